"""The KV blocks of one tier: the free ones, and every job's block table.

Only block numbers are kept here; the ranks hold the blocks themselves. Paged KV as in vLLM's
PagedAttention (Kwon et al. 2023, §4): position ``p`` of a job is in ``table[p // block_size]``.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile


class OutOfBlocksError(Exception):
    """An allocation asked for more blocks than are free; nothing was allocated."""


class KeptBlocks:
    """Free blocks whose content may still be useful, each under a key that identifies the content.

    Several blocks may have the same key. ``take_oldest`` costs O(blocks of one key), all other
    operations O(1).
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[int, bytes] = OrderedDict()  # by block, the oldest first
        self._blocks: dict[bytes, list[int]] = {}  # by key, the oldest first

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        """Whether a block has this key."""
        return key in self._blocks

    def add(self, block: int, key: bytes) -> None:
        """Keep a block. ``key`` identifies its content."""
        self._keys[block] = key
        self._blocks.setdefault(key, []).append(block)

    def take(self, key: bytes) -> int | None:
        """Remove and return the youngest block with this key; None: there is none."""
        if key not in self._blocks:
            return None
        block = self._blocks[key].pop()
        del self._keys[block]
        self._forget_if_last(key)
        return block

    def take_oldest(self) -> int:
        """Remove and return the oldest block, whose content is lost. There must be one."""
        block, key = self._keys.popitem(last=False)
        self._blocks[key].pop(0)
        self._forget_if_last(key)
        return block

    def _forget_if_last(self, key: bytes) -> None:
        if not self._blocks[key]:
            del self._blocks[key]


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Each is free or in one job's table.

    Some free blocks keep their content. They are used only when no other block is free.

    Jobs are known by their number. All operations on one job cost O(blocks of the job).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"need blocks of at least one token: {num_blocks} × {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is used first, while it is warm in the processor's cache.
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._kept = KeptBlocks()
        self._tables: dict[int, array[int]] = {}

    @property
    def capacity(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_full_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill to the end."""
        return num_tokens // self.block_size

    def missing(self, job_number: int, num_tokens: int) -> int:
        """Blocks to add to the job's table before it can hold ``num_tokens`` tokens."""
        # Each job of a step asks this, so it calls no other method.
        table = self._tables.get(job_number)
        num_held = len(table) if table is not None else 0
        missing = -(-num_tokens // self.block_size) - num_held
        return missing if missing > 0 else 0

    def grow(self, job_number: int, num_tokens: int) -> None:
        """Make the job's table hold ``num_tokens`` tokens.

        Raises:
            OutOfBlocksError: too few free blocks; the table is unchanged.
        """
        needed = self.missing(job_number, num_tokens)
        if needed == 0:
            return
        if needed > self.num_free:
            raise OutOfBlocksError(
                f"job {job_number} needs {needed} of {self.num_free} free blocks"
            )
        table = self._tables.setdefault(job_number, array("i"))
        for _ in range(needed):
            table.append(self._free.pop() if self._free else self._kept.take_oldest())

    def release(self, job_number: int, keys: Sequence[bytes] = ()) -> None:
        """Free all blocks of the job. A job without blocks is fine.

        Args:
            keys: identify the contents of the job's first blocks. Each of these blocks keeps its
                content until it is used again.
        """
        table = self._tables.pop(job_number, array("i"))
        self._free.extend(reversed(table[len(keys) :]))
        # The last block first, so that it is the first to be lost: a block is reusable only
        # together with all preceding blocks.
        for block, key in zip(reversed(table[: len(keys)]), reversed(keys), strict=True):
            self._kept.add(block, key)

    def reuse_kept(self, job_number: int, keys: Iterable[bytes]) -> int:
        """Give a job without blocks the kept blocks with these keys, in this order, up to the first
        key that no block has. Returns how many."""
        assert job_number not in self._tables, f"job {job_number} has blocks"
        table = array("i")
        for key in keys:
            block = self._kept.take(key)
            if block is None:
                break
            table.append(block)
        if table:
            self._tables[job_number] = table
        return len(table)

    def num_kept(self, keys: Iterable[bytes]) -> int:
        """How many of these keys, up to the first that is missing, have a kept block."""
        return sum(1 for _ in takewhile(self._kept.__contains__, keys))

    def table(self, job_number: int) -> array[int]:
        """The job's block numbers in order of position. The caller must not change it."""
        return self._tables[job_number]

    def num_held(self, job_number: int) -> int:
        """Blocks in the job's table."""
        table = self._tables.get(job_number)
        return len(table) if table is not None else 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block is in exactly one place."""
        seen = [*self._free, *self._kept]
        for table in self._tables.values():
            assert len(table) > 0, "a job without blocks must have no table"
            seen.extend(table)
        assert sorted(seen) == list(range(self.num_blocks)), "a block is lost or owned twice"
