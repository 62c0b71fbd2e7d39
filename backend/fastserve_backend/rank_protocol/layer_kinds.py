"""Kinds of layers, by how far they look back, and how many KV blocks a job needs for them.

A block holds ``block_size`` tokens of one *group* of layers. All groups have equally many layers,
so one pool of blocks serves them all. Layers of one kind have the same window, and their groups
need the same blocks: those that the next tokens see. `checkpoints.layer_groups` forms the groups,
as vLLM's hybrid KV cache manager does.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with the same window, in ``num_groups`` groups."""

    window: int | None
    """How many tokens a token attends to, itself included; None: all before it."""
    num_groups: int

    def first_seen(self, position: int, block_size: int) -> int:
        """The first block of a group to which the token at ``position`` attends.

        A window of one token counts as two, so that no job with KV is ever without blocks.
        """
        if self.window is None:
            return 0
        return max(0, position + 1 - max(2, self.window)) // block_size


ONE_GROUP = (LayerKind(None, 1),)
"""All layers see all tokens: each block has every layer."""


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """Counts the blocks of all groups that a job needs.

    kinds: at most one has no window, and it comes first.
    step_tokens: most tokens of a job in one step.
    """

    block_size: int
    kinds: tuple[LayerKind, ...] = ONE_GROUP
    step_tokens: int = 1

    @property
    def has_windows(self) -> bool:
        """Whether some blocks fall behind a window while their job goes on."""
        return self.kinds[-1].window is not None

    @property
    def num_groups(self) -> int:
        """Groups of all kinds."""
        return sum(kind.num_groups for kind in self.kinds)

    def for_step(self, first_token: int, num_tokens: int) -> int:
        """Blocks with which a job runs the tokens from ``first_token`` up to ``num_tokens``."""
        end = -(-num_tokens // self.block_size)
        if not self.has_windows:
            return end
        return sum(
            kind.num_groups * (end - kind.first_seen(first_token, self.block_size))
            for kind in self.kinds
        )

    def computed(self, num_tokens: int) -> int:
        """Blocks of a job's first ``num_tokens`` tokens that its next token sees."""
        return self.for_step(num_tokens, num_tokens)

    def most(self, num_tokens: int, num_steps: int = 1) -> int:
        """The most blocks that a job of ``num_tokens`` tokens needs at any time.

        Args:
            num_steps: of so many steps of the job none has ended yet.
        """
        end = -(-num_tokens // self.block_size)
        total = 0
        for window, num_groups in ((kind.window, kind.num_groups) for kind in self.kinds):
            count = end
            if window is not None:
                in_use = max(2, window) - 1 + num_steps * self.step_tokens
                count = min(end, 1 + -(-in_use // self.block_size))
            total += num_groups * count
        return total

    def longest_job(self, num_blocks: int) -> int:
        """Tokens of the longest job that runs on ``num_blocks`` blocks alone."""
        if not self.has_windows:
            return num_blocks * self.block_size
        if self.kinds[0].window is not None and self.most(sys.maxsize) <= num_blocks:
            return sys.maxsize
        lengths = range(0, (num_blocks + 1) * self.block_size, self.block_size)
        return lengths[bisect_right(lengths, num_blocks, key=self.most) - 1]
