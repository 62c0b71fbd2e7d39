"""Which rank has which part of a model: only arithmetic, without torch.

Tensor parallelism divides every layer; pipeline parallelism divides the sequence of layers into
stages (FastServe §4.3, Megatron-LM). Ranks are numbered stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands among the others."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1

    @classmethod
    def of(cls, rank: int, tensor_size: int, num_stages: int) -> RankPlace:
        return cls(rank % tensor_size, tensor_size, rank // tensor_size, num_stages)

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1


def span(size: int, index: int, count: int) -> range:
    """Part ``index`` of ``size`` things, divided into ``count`` neighbouring parts. Their sizes
    differ by at most one; the first parts are the larger ones."""
    small, larger = divmod(size, count)
    start = index * small + min(index, larger)
    return range(start, start + small + (index < larger))


def stage_layers(num_layers: int, num_stages: int, table_layers: float = 0.0) -> tuple[range, ...]:
    """The layers of each stage, at least one, such that the largest stage is as small as possible.

    Args:
        table_layers: size, in layers, of the embedding and of the LM head. The first stage also
            has the embedding, the last stage the head.
    """
    size = [1.0] * num_stages
    size[0] += table_layers
    size[-1] += table_layers
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        stage = size.index(min(size))
        size[stage] += 1
        counts[stage] += 1
    bounds = accumulate(counts, initial=0)
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def layers_of_stages(model: ModelConfig, num_stages: int) -> tuple[range, ...]:
    """``stage_layers`` with sizes in parameters. A tied head counts too: the first and the last
    stage then each have a copy of the table."""
    table_layers = model.num_head_parameters / model.num_layer_parameters
    return stage_layers(model.num_layers, num_stages, table_layers)


def share_of_kv(model: ModelConfig, tensor_size: int, num_stages: int) -> float:
    """The share of a KV block on a rank of the largest stage, which decides how many jobs fit."""
    groups = model.layer_groups
    most = max(groups.depth(layers) for layers in layers_of_stages(model, num_stages))
    return most / (groups.depth() * tensor_size)


def check_parallel(model: ModelConfig, tensor_size: int, num_stages: int) -> None:
    """Raises ConfigError, with the allowed sizes, if the model cannot be divided like this."""
    divided = gcd(model.num_heads, model.num_kv_heads)
    if divided % tensor_size:
        allowed = (str(size) for size in range(1, divided + 1) if divided % size == 0)
        raise ConfigError(
            f"parallel.tensor_parallel_size: got {tensor_size}; must divide the {model.num_heads} "
            f"heads and {model.num_kv_heads} KV heads of {model.name}: "
            f"{', '.join(allowed)}"
        )
    if not 1 <= num_stages <= model.num_layers:
        raise ConfigError(
            f"parallel.pipeline_parallel_size: got {num_stages}; must be from 1 to "
            f"{model.num_layers}, the layers of {model.name}"
        )
