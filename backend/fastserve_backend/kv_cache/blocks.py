"""The KV blocks of one tier: the free ones, and every job's block tables.

Only block numbers are kept here; the ranks hold the blocks themselves. Paged KV as in vLLM's
PagedAttention (Kwon et al. 2023, §4): position ``p`` of a job is in block ``p // block_size`` of
each group of layers (`layer_kinds`). Most models have one group.

A job has a table for each kind of layers. Of a kind with m groups, the table has m entries for each
block of a group, one a group. A table begins with the first block that the job has; without a
window that is block 0.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import cast

from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind


class OutOfBlocksError(Exception):
    """An allocation asked for more blocks than are free; nothing was allocated."""


class KeptBlocks:
    """Free blocks whose content may still be useful, each under a key that identifies the content.

    Several blocks may have the same key. ``take_oldest`` costs O(blocks of one key), all other
    operations O(1).
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[int, Hashable] = OrderedDict()  # by block, the oldest first
        self._blocks: dict[Hashable, list[int]] = {}  # by key, the oldest first

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        """Whether a block has this key."""
        return key in self._blocks

    def add(self, block: int, key: Hashable) -> None:
        """Keep a block. ``key`` identifies its content."""
        self._keys[block] = key
        self._blocks.setdefault(key, []).append(block)

    def take(self, key: Hashable) -> int | None:
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

    def _forget_if_last(self, key: Hashable) -> None:
        if not self._blocks[key]:
            del self._blocks[key]


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Each is free or in one job's tables.

    Some free blocks keep their content. They are used only when no other block is free.

    Jobs are known by their number. All operations on one job cost O(blocks of the job).

    Args:
        kinds: of the model's layers.
    """

    def __init__(
        self, num_blocks: int, block_size: int, kinds: Sequence[LayerKind] = ONE_GROUP
    ) -> None:
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"need blocks of at least one token: {num_blocks} × {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kinds = tuple(kinds)
        self.has_windows = BlockNeeds(block_size, self.kinds).has_windows
        """Whether tables may begin with another block than block 0."""
        # A stack: the block freed last is used first, while it is warm in the processor's cache.
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._kept = KeptBlocks()
        self._tables: dict[int, list[array[int]]] = {}  # by kind
        self._firsts: dict[int, list[int]] = {}  # by kind: with which block the table begins

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_full_blocks(self, num_tokens: int) -> int:
        """Blocks of one group that ``num_tokens`` tokens fill to the end."""
        return num_tokens // self.block_size

    def missing(self, job_number: int, num_tokens: int, first_token: int = 0) -> int:
        """Blocks to add before the job can run its tokens from ``first_token`` up to
        ``num_tokens``."""
        # Each job of a step asks this, so it calls no other method.
        if self.has_windows:
            return sum(self._missing_of_kinds(job_number, num_tokens, first_token))
        tables = self._tables.get(job_number)
        num_held = len(tables[0]) if tables is not None else 0
        missing = -(-num_tokens // self.block_size) - num_held
        return missing if missing > 0 else 0

    def grow(self, job_number: int, num_tokens: int, first_token: int = 0) -> None:
        """Add what is ``missing``.

        Raises:
            OutOfBlocksError: too few free blocks; the tables are unchanged.
        """
        missing = self._missing_of_kinds(job_number, num_tokens, first_token)
        needed = sum(missing)
        if needed == 0:
            return
        if needed > self.num_free:
            raise OutOfBlocksError(
                f"job {job_number} needs {needed} of {self.num_free} free blocks"
            )
        for table, count in zip(self._tables_of(job_number, first_token), missing, strict=True):
            for _ in range(count):
                table.append(self._free.pop() if self._free else self._kept.take_oldest())

    def num_before(self, job_number: int, position: int) -> int:
        """The job's blocks that no token from ``position`` on sees."""
        firsts = self._firsts.get(job_number, ())
        return sum(
            kind.num_groups * min(seen - first, self._end(job_number, index) - first)
            for index, (kind, first) in enumerate(zip(self.kinds, firsts, strict=False))
            if (seen := kind.first_seen(position, self.block_size)) > first
        )

    def free_before(
        self, job_number: int, position: int, keys: Sequence[bytes] = ()
    ) -> list[range]:
        """Free the job's blocks that no token from ``position`` on sees.

        Args:
            keys: as for ``release``.

        Returns:
            for each kind which blocks of a group were freed.
        """
        freed = []
        for index, kind in enumerate(self.kinds):
            first, end = self._firsts[job_number][index], self._end(job_number, index)
            seen = max(first, kind.first_seen(position, self.block_size))
            stop = min(seen, end)
            table = self._tables[job_number][index]
            self._free_part(index, table[: (stop - first) * kind.num_groups], first, keys)
            del table[: (stop - first) * kind.num_groups]
            self._firsts[job_number][index] = seen
            freed.append(range(first, stop))
        self._forget_if_empty(job_number)
        return freed

    def release(self, job_number: int, keys: Sequence[bytes] = ()) -> None:
        """Free all blocks of the job. A job without blocks is fine.

        Args:
            keys: identify the contents of the first blocks of each group. Each of these blocks
                keeps its content until it is used again.
        """
        firsts = self._firsts.pop(job_number, ())
        for index, table in enumerate(self._tables.pop(job_number, ())):
            self._free_part(index, table, firsts[index], keys)

    def take_kept(self, job_number: int, keys: Sequence[bytes], parts: Sequence[range]) -> None:
        """Give a job without blocks kept blocks.

        Args:
            keys: of the first blocks of a group.
            parts: for each kind which blocks of its groups, all of them kept.
        """
        assert job_number not in self._tables, f"job {job_number} has blocks"
        tables = []
        for index, part in enumerate(parts):
            groups = range(self.kinds[index].num_groups)
            of_part = keys[part.start : part.stop]
            blocks = [self._kept.take((key, index, group)) for key in of_part for group in groups]
            assert None not in blocks, "a block is not kept any more"
            tables.append(array("i", cast(list[int], blocks)))
        if any(tables):
            self._tables[job_number] = tables
            self._firsts[job_number] = [part.start for part in parts]

    def hand_over(self, job_number: int, heir: int) -> None:
        """Give a job's blocks, if it has any, to a job without blocks."""
        assert heir not in self._tables, f"job {heir} has blocks"
        if job_number in self._tables:
            self._tables[heir] = self._tables.pop(job_number)
            self._firsts[heir] = self._firsts.pop(job_number)

    def is_kept(self, key: bytes, kind: int = 0) -> bool:
        """Whether each group of the kind has a kept block with this key."""
        num_groups = self.kinds[kind].num_groups
        if num_groups == 1:  # the usual case, without a generator
            return (key, kind, 0) in self._kept
        return all((key, kind, group) in self._kept for group in range(num_groups))

    def table(self, job_number: int, kind: int = 0) -> array[int]:
        """The job's block numbers for a kind, in order of position and then of groups. The caller
        must not change it."""
        return self._tables[job_number][kind]

    def first(self, job_number: int, kind: int = 0) -> int:
        """With which block of a group the job's table for a kind begins."""
        return self._firsts[job_number][kind]

    def blocks_at(self, job_number: int, kind: int, part: range) -> array[int]:
        """The numbers of the blocks ``part`` of each group of the kind, as in ``table``."""
        first, num_groups = self._firsts[job_number][kind], self.kinds[kind].num_groups
        table = self._tables[job_number][kind]
        return table[(part.start - first) * num_groups : (part.stop - first) * num_groups]

    def all_blocks(self, job_number: int) -> list[int]:
        """The numbers of the job's blocks of all kinds."""
        return [block for table in self._tables.get(job_number, ()) for block in table]

    def end(self, job_number: int) -> int:
        """The first block of a group behind those that the job has, of any kind."""
        if job_number not in self._tables:
            return 0
        return max(self._end(job_number, kind) for kind in range(len(self.kinds)))

    def num_held(self, job_number: int) -> int:
        """Blocks in the job's tables."""
        tables = self._tables.get(job_number)
        if tables is None:
            return 0
        return len(tables[0]) if len(tables) == 1 else sum(map(len, tables))

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block is in exactly one place."""
        seen = [*self._free, *self._kept]
        for tables in self._tables.values():
            assert any(tables), "a job without blocks must have no table"
            for kind, table in zip(self.kinds, tables, strict=True):
                assert len(table) % kind.num_groups == 0, "a group lacks a block"
                seen.extend(table)
        assert sorted(seen) == list(range(self.num_blocks)), "a block is lost or owned twice"
        assert self._tables.keys() == self._firsts.keys()

    def _missing_of_kinds(self, job_number: int, num_tokens: int, first_token: int) -> list[int]:
        end = -(-num_tokens // self.block_size)
        is_new = job_number not in self._tables
        missing = []
        for index, kind in enumerate(self.kinds):
            begin = kind.first_seen(first_token, self.block_size)
            if not is_new:
                begin = max(begin, self._end(job_number, index))
            missing.append(kind.num_groups * max(0, end - begin))
        return missing

    def _tables_of(self, job_number: int, first_token: int) -> list[array[int]]:
        """The job's tables. New ones begin with what ``first_token`` sees."""
        if job_number not in self._tables:
            self._tables[job_number] = [array("i") for _ in self.kinds]
            self._firsts[job_number] = [
                kind.first_seen(first_token, self.block_size) for kind in self.kinds
            ]
        return self._tables[job_number]

    def _end(self, job_number: int, kind: int) -> int:
        """The first block of a group behind those of the job's table for a kind."""
        length = len(self._tables[job_number][kind])
        return self._firsts[job_number][kind] + length // self.kinds[kind].num_groups

    def _free_part(self, kind: int, blocks: array[int], first: int, keys: Sequence[bytes]) -> None:
        """Free blocks of a kind's table, of which the first is block ``first`` of a group."""
        num_groups = self.kinds[kind].num_groups
        num_kept = max(0, len(keys) - first) * num_groups
        self._free.extend(reversed(blocks[num_kept:]))
        # The last block first, so that it is the first to be lost: a block is reusable only
        # together with all preceding blocks.
        for index in range(min(num_kept, len(blocks)) - 1, -1, -1):
            key = keys[first + index // num_groups]
            self._kept.add(blocks[index], (key, kind, index % num_groups))

    def _forget_if_empty(self, job_number: int) -> None:
        if not any(self._tables[job_number]):
            del self._tables[job_number], self._firsts[job_number]
