"""The experts of a mixture: what families differ in, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_kernels.routing_rule import RoutingRule

from fastserve_backend.checkpoints.hf_config import HFConfig


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's activation: see `fastserve_kernels.ops.clamped_swiglu`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of a feed-forward block. A router chooses `top_k` of `count`
    experts for each token (Shazeer et al. 2017).

    intermediate_size: features between an expert's two products.
    routing: how the router turns scores into choices and weights.
    has_choice_bias: each expert has a bias, which counts for the choice alone.
    has_biases: of the router and of the experts' products.
    is_fused: gate and up are one tensor in the checkpoint, whose rows take turns (gpt-oss).
    may_be_transposed: the checkpoint may have all experts' matrices as [in, out] (Qwen3-VL).
    clamped_gate: None: SiLU of the gate.
    shared_size: features of one more expert, which computes all tokens; 0: there is none.
    shared_has_gate: its result is multiplied by the logistic function of one more product.
    """

    count: int
    top_k: int
    intermediate_size: int
    routing: RoutingRule
    has_choice_bias: bool = False
    has_biases: bool = False
    is_fused: bool = False
    may_be_transposed: bool = False
    clamped_gate: ClampedGate | None = None
    shared_size: int = 0
    shared_has_gate: bool = False

    def num_expert_parameters(self, hidden: int) -> int:
        """Elements of one expert's weights."""
        ffn = self.intermediate_size
        return 3 * hidden * ffn + self.has_biases * (2 * ffn + hidden)

    def num_common_parameters(self, hidden: int) -> int:
        """Elements of what every token uses: the router and the shared expert."""
        router = self.count * (hidden + self.has_biases + self.has_choice_bias)
        shared = (3 * self.shared_size + self.shared_has_gate) * hidden
        return router + shared

    def num_parameters(self, hidden: int) -> int:
        """Elements of the block's weights."""
        return self.num_common_parameters(hidden) + self.count * self.num_expert_parameters(hidden)

    def share_read(self, tokens: int) -> float:
        """The expected share of the experts that so many tokens choose, if each chooses at
        random."""
        return 1.0 - (1.0 - self.top_k / self.count) ** tokens


def read_choices(
    raw: HFConfig, count_key: str, count: int, top_k: int, *, top_k_key: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """The number of experts and of those that a token chooses.

    Args:
        count_key, top_k_key: their fields; transformers 5 may write ``num_local_experts`` in place
            of the first.
        count, top_k: the family's defaults.

    Raises:
        ModelError: a token would choose more experts than there are.
    """
    other_key = "num_local_experts"
    count = raw.integer(count_key, raw.integer(other_key, count))
    top_k = raw.integer(top_k_key, top_k)
    if top_k > count:
        raise raw.error(top_k_key, f"at most the {count} experts")
    return count, top_k


def read_groups(raw: HFConfig, count: int, top_k: int) -> tuple[int, int]:
    """The groups of `count` experts, and those of them from which a token chooses `top_k`.

    Raises:
        ModelError: the groups differ in size, or have too few experts.
    """
    groups, chosen = raw.integer("n_group", 1), raw.integer("topk_group", 1)
    if count % groups:
        raise raw.error("n_group", f"a divisor of the {count} experts")
    if chosen > groups or top_k > chosen * (count // groups):
        raise raw.error("topk_group", f"as many of the {groups} groups as have {top_k} experts")
    return groups, chosen
