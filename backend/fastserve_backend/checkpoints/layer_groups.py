"""Divides a model's layers into groups that share KV blocks: only arithmetic, without torch.

Layers with the same window are a kind. All groups have about equally many layers, so that a block
of any group has the same number of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fastserve_backend.rank_protocol.layer_kinds import LayerKind

# More groups of one kind would waste less of a block, but a step has a block table for each.
_MOST_GROUPS = 8


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of all kinds are numbered: first those of the first kind.

    group_of: for each layer the number of its group.
    """

    kinds: tuple[LayerKind, ...]
    group_of: tuple[int, ...]

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> LayerGroups:
        """
        Args:
            windows: of each layer, as in `ModelConfig.windows`.
        """
        counts = Counter(windows)
        depth = max(min(counts.values()), -(-max(counts.values()) // _MOST_GROUPS))
        ordered = sorted(counts, key=lambda window: (window is not None, window or 0))
        kinds = tuple(LayerKind(window, -(-counts[window] // depth)) for window in ordered)
        firsts = accumulate((kind.num_groups for kind in kinds), initial=0)
        next_groups = {}
        for kind, first in zip(kinds, firsts, strict=False):
            next_groups[kind.window] = (first, kind.num_groups)
        seen: Counter[int | None] = Counter()
        group_of = []
        for window in windows:
            first, num_groups = next_groups[window]
            # In turn, so that each pipeline stage has a share of each group.
            group_of.append(first + seen[window] % num_groups)
            seen[window] += 1
        return cls(kinds, tuple(group_of))

    @property
    def kind_of_group(self) -> tuple[int, ...]:
        """For each group the index of its kind."""
        return tuple(index for index, kind in enumerate(self.kinds) for _ in range(kind.num_groups))

    def places(self, layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """For each of a stage's ``layers`` its group, and its number among the stage's layers of
        that group."""
        seen: Counter[int] = Counter()
        places = []
        for layer in layers:
            group = self.group_of[layer]
            places.append((group, seen[group]))
            seen[group] += 1
        return tuple(places)

    def depth(self, layers: Sequence[int] | None = None) -> int:
        """Layers for which a block has room: the most that ``layers`` has of one group. None: all
        layers of the model."""
        in_stage = self.group_of if layers is None else [self.group_of[layer] for layer in layers]
        return max(Counter(in_stage).values())
