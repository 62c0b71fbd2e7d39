"""The experts of a mixture: what families differ in, without torch."""

from __future__ import annotations

from dataclasses import dataclass

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
    renormalises: the weights of the chosen experts sum to 1: they are the softmax of the chosen
        scores. Otherwise they are taken from the softmax of all scores.
    has_biases: of the router and of the experts' products.
    is_fused: gate and up are one tensor in the checkpoint, whose rows take turns (gpt-oss).
    clamped_gate: None: SiLU of the gate.
    shared_size: features of one more expert, which computes all tokens, with a gate of its own;
        0: there is none.
    """

    count: int
    top_k: int
    intermediate_size: int
    renormalises: bool
    has_biases: bool = False
    is_fused: bool = False
    clamped_gate: ClampedGate | None = None
    shared_size: int = 0

    def num_expert_parameters(self, hidden: int) -> int:
        """Elements of one expert's weights."""
        ffn = self.intermediate_size
        return 3 * hidden * ffn + self.has_biases * (2 * ffn + hidden)

    def num_common_parameters(self, hidden: int) -> int:
        """Elements of what every token uses: the router and the shared expert."""
        router = self.count * (hidden + self.has_biases)
        shared = (3 * self.shared_size + 1) * hidden if self.shared_size else 0
        return router + shared

    def num_parameters(self, hidden: int) -> int:
        """Elements of the block's weights."""
        return self.num_common_parameters(hidden) + self.count * self.num_expert_parameters(hidden)

    def share_read(self, tokens: int) -> float:
        """The expected share of the experts that so many tokens choose, if each chooses at
        random."""
        return 1.0 - (1.0 - self.top_k / self.count) ** tokens


def read_choices(raw: HFConfig, count_key: str, count: int, top_k: int) -> tuple[int, int]:
    """The number of experts and of those that a token chooses.

    Args:
        count_key: its field; transformers 5 may write ``num_local_experts`` in its place.
        count, top_k: the family's defaults.

    Raises:
        ModelError: a token would choose more experts than there are.
    """
    other_key = "num_local_experts"
    count = raw.integer(count_key, raw.integer(other_key, count))
    top_k = raw.integer("num_experts_per_tok", top_k)
    if top_k > count:
        raise raw.error("num_experts_per_tok", f"at most the {count} experts")
    return count, top_k
