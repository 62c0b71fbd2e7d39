"""The KV blocks of one tier: one owner of the free list and of every job's block table.

Pure bookkeeping of block numbers; the blocks themselves live in the ranks. Paged KV as in vLLM's
PagedAttention (Kwon et al. 2023, §4): a job's position ``p`` lies in ``table[p // block_size]``.
"""

from __future__ import annotations

from array import array


class OutOfBlocksError(Exception):
    """An allocation asked for more blocks than are free; nothing was allocated."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, each in the free list or in one job's table.

    Jobs are known by their number. All operations on one job cost O(blocks of the job).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"need blocks of at least one token: {num_blocks} × {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is used first, while it is warm in the processor's cache.
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._tables: dict[int, array[int]] = {}

    @property
    def capacity(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_full(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill to the end."""
        return num_tokens // self.block_size

    def missing(self, job_number: int, num_tokens: int) -> int:
        """Blocks to add to the job's table before it can hold ``num_tokens`` tokens."""
        return max(0, self.blocks_for(num_tokens) - self.num_held(job_number))

    def grow(self, job_number: int, num_tokens: int) -> None:
        """Make the job's table hold ``num_tokens`` tokens.

        Raises:
            OutOfBlocksError: too few free blocks; the table is unchanged.
        """
        needed = self.missing(job_number, num_tokens)
        if needed == 0:
            return
        if needed > len(self._free):
            raise OutOfBlocksError(
                f"job {job_number} needs {needed} of {len(self._free)} free blocks"
            )
        table = self._tables.setdefault(job_number, array("i"))
        for _ in range(needed):
            table.append(self._free.pop())

    def release(self, job_number: int) -> None:
        """Free all blocks of the job. A job without blocks is fine."""
        self._free.extend(reversed(self._tables.pop(job_number, array("i"))))

    def table(self, job_number: int) -> array[int]:
        """The job's block numbers in order of position. The caller must not change it."""
        return self._tables[job_number]

    def num_held(self, job_number: int) -> int:
        """Blocks in the job's table."""
        table = self._tables.get(job_number)
        return len(table) if table is not None else 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block is in exactly one place."""
        seen = list(self._free)
        for table in self._tables.values():
            assert len(table) > 0, "a job without blocks must have no table"
            seen.extend(table)
        assert sorted(seen) == list(range(self.num_blocks)), "a block is lost or owned twice"
