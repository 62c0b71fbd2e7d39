"""The KV blocks of one tier: one owner of the free list and of every job's block table.

Pure bookkeeping of block numbers; the blocks themselves live in the ranks. Paged KV as in vLLM's
PagedAttention (Kwon et al. 2023, §4): a job's position ``p`` lies in ``table[p // block_size]``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile

from fastserve_backend.kv_cache.kept_blocks import KeptBlocks


class OutOfBlocksError(Exception):
    """An allocation asked for more blocks than are free; nothing was allocated."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, each free or in one job's table. Some of the
    free ones keep what they hold, and are used when no other is left.

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

    def num_blocks_full(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill to the end."""
        return num_tokens // self.block_size

    def missing(self, job_number: int, num_tokens: int) -> int:
        """Blocks to add to the job's table before it can hold ``num_tokens`` tokens."""
        # Asked of each job of an iteration, so without the methods that it is made of.
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
            keys: of what the first of its blocks hold, to be kept while they are not needed.
        """
        table = self._tables.pop(job_number, array("i"))
        self._free.extend(reversed(table[len(keys) :]))
        # The last first: it is of use only to whom all those before it are.
        for block, key in zip(reversed(table[: len(keys)]), reversed(keys), strict=True):
            self._kept.add(block, key)

    def recall(self, job_number: int, keys: Iterable[bytes]) -> int:
        """Give a job without blocks those that were kept under the first of these keys, up to the
        first that is missing; returns how many."""
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
        """Of these keys, those before the first under which no block is kept."""
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
