"""The KV blocks of one tier: which jobs refer to them, and which are found by their content.

Only block numbers are kept here; the ranks hold the blocks themselves. Paged KV as in vLLM's
PagedAttention (Kwon et al. 2023, §4): position ``p`` of a job is in block ``p // block_size`` of
each group of layers (`layer_kinds`). Most models have one group.

A job has a table for each kind of layers. Of a kind with m groups, the table has m entries for each
block of a group, one a group. A table begins with the first block that the job has; without a
window that is block 0.

Jobs that begin alike refer to the same blocks. A full block never changes. So it may be *published*
under a key that identifies its content, and whoever needs this content finds it. A published block
that no job has any more is *cached*: it is free, but it is used again only when no other free block
is left.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from fastserve_backend.kv_cache.references import Blocks, JobSet, References
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind

_Key = tuple[bytes, int, int]  # of the content; the kind of layers; the group
_NO_BLOCKS = np.zeros(0, np.int32)


class OutOfBlocksError(Exception):
    """An allocation asked for more blocks than are free; nothing was allocated."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Each is free or in the tables of jobs.

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
        self.references = References(num_blocks, self)
        """Only the pool changes them."""
        # A stack: the block freed last is used first, while it is warm in the processor's cache.
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._published: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}  # by published block
        self._tables: dict[int, list[array[int]]] = {}  # by kind
        self._firsts: dict[int, list[int]] = {}  # by kind: with which block the table begins

    # --- Numbers ------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks that several jobs have."""
        return self.references.num_shared

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_full_blocks(self, num_tokens: int) -> int:
        """Blocks of one group that ``num_tokens`` tokens fill to the end."""
        return num_tokens // self.block_size

    def num_held(self, job_number: int) -> int:
        """Blocks in the job's tables."""
        tables = self._tables.get(job_number)
        if tables is None:
            return 0
        return len(tables[0]) if len(tables) == 1 else sum(map(len, tables))

    def num_alone(self, job_number: int) -> int:
        """The job's blocks that no other job has."""
        if not self.num_shared:
            return self.num_held(job_number)
        return self.references.num_alone(self.all_blocks(job_number))

    def num_before(self, job_number: int, position: int) -> int:
        """The job's blocks that no token from ``position`` on sees."""
        return sum(self._num_unseen(job_number, position))

    def missing(self, job_number: int, num_tokens: int, first_token: int = 0) -> int:
        """Blocks to add before the job can run its tokens from ``first_token`` up to
        ``num_tokens``."""
        # Each job of a step asks this, so it calls no other method.
        if self.has_windows:
            return sum(map(len, self._missing_places(job_number, num_tokens, first_token)))
        tables = self._tables.get(job_number)
        num_held = len(tables[0]) if tables is not None else 0
        missing = -(-num_tokens // self.block_size) - num_held
        return missing if missing > 0 else 0

    def missing_but_for(
        self, job_number: int, num_tokens: int, first_token: int, keys: Sequence[bytes]
    ) -> tuple[int, int]:
        """As ``missing``, for ``grow_from``.

        Returns:
            the free blocks that it takes, and how many of them have no content yet.
        """
        if not keys:
            missing = self.missing(job_number, num_tokens, first_token)
            return missing, missing
        num_free = num_new = 0
        for kind, places in enumerate(self._missing_places(job_number, num_tokens, first_token)):
            found = self._find(keys, kind, places)
            num_new += len(places) - len(found)
            num_free += sum(block in self._cached for block in found)
        return num_free + num_new, num_new

    # --- Blocks of a job ----------------------------------------------------------------------

    def grow(self, job_number: int, num_tokens: int, first_token: int = 0) -> None:
        """Add what is ``missing``.

        Raises:
            OutOfBlocksError: too few free blocks; the tables are unchanged.
        """
        if len(self.kinds) > 1 or self.has_windows:
            self.grow_from(job_number, num_tokens, first_token, ())
        elif missing := self.missing(job_number, num_tokens):
            self._check_free(job_number, missing)
            new_blocks = self._take_free(missing)
            self.references.add_new(job_number, new_blocks)
            self._tables_of(job_number, 0)[0].extend(new_blocks)

    def grow_from(
        self, job_number: int, num_tokens: int, first_token: int, keys: Sequence[bytes]
    ) -> list[range]:
        """Add what is ``missing``. The job refers to the first of these blocks as far as they are
        published under its keys.

        Args:
            keys: of the job's first blocks of a group.

        Returns:
            for each kind the places whose blocks have no content yet. Block i of group g of m
            groups is at place i · m + g.

        Raises:
            OutOfBlocksError: too few free blocks; the tables are unchanged.
        """
        if not keys and len(self.kinds) == 1 and not self.has_windows:  # the usual case
            num_held = self.num_held(job_number)
            self.grow(job_number, num_tokens)
            return [range(num_held, self.num_held(job_number))]
        missing = self._missing_places(job_number, num_tokens, first_token)
        found = [self._find(keys, kind, places) for kind, places in enumerate(missing)]
        shared = [block for row in found for block in row]
        num_new = sum(map(len, missing)) - len(shared)
        self._check_free(job_number, num_new + sum(block in self._cached for block in shared))
        # First what is found, so that no cached block of it is used for something else.
        self._refer(job_number, shared)
        new_blocks = self._take_free(num_new)
        self.references.add_new(job_number, new_blocks)
        new_places = [places[len(row) :] for places, row in zip(missing, found, strict=True)]
        if any(missing):
            rest = iter(new_blocks)
            tables = self._tables_of(job_number, first_token)
            for table, row, new in zip(tables, found, new_places, strict=True):
                table.extend(row)
                table.extend(islice(rest, len(new)))
        return new_places

    def refer_to(self, job_number: int, keys: Sequence[bytes], parts: Sequence[range]) -> None:
        """Give a job without blocks published ones.

        Args:
            keys: of the first blocks of a group.
            parts: for each kind which blocks of its groups, all of them published.
        """
        assert job_number not in self._tables, f"job {job_number} has blocks"
        tables = []
        for kind, part in enumerate(parts):
            groups = range(self.kinds[kind].num_groups)
            of_part = keys[part.start : part.stop]
            tables.append(
                array(
                    "i", (self._published[key, kind, group] for key in of_part for group in groups)
                )
            )
        if any(tables):
            self._refer(job_number, [block for table in tables for block in table])
            self._tables[job_number] = tables
            self._firsts[job_number] = [part.start for part in parts]

    def free_before(self, job_number: int, position: int) -> None:
        """The job gives up its blocks that no token from ``position`` on sees."""
        for kind, num_unseen in enumerate(self._num_unseen(job_number, position)):
            table, firsts = self._tables[job_number][kind], self._firsts[job_number]
            self._give_up(job_number, table[:num_unseen])
            del table[:num_unseen]
            seen = self.kinds[kind].first_seen(position, self.block_size)
            firsts[kind] = max(firsts[kind], seen)
        self._forget_if_empty(job_number)

    def cut_off(self, job_number: int, num_tokens: int) -> None:
        """The job gives up its blocks behind its first ``num_tokens`` tokens. It is the only one
        that writes to the last of the others, if that is not full."""
        if job_number not in self._tables:
            return
        end, num_full = self.blocks_for(num_tokens), self.num_full_blocks(num_tokens)
        for kind, table in enumerate(self._tables[job_number]):
            first, num_groups = self._firsts[job_number][kind], self.kinds[kind].num_groups
            length = max(0, end - first) * num_groups
            self._give_up(job_number, table[length:])
            del table[length:]
            for block in table[max(0, num_full - first) * num_groups :]:
                assert self.references.counts[block] == 1, "others have this block"
                self._withdraw(block)
        self._forget_if_empty(job_number)

    def release(self, job_number: int) -> None:
        """The job gives up all its blocks. A job without blocks is fine."""
        self._firsts.pop(job_number, None)
        for table in self._tables.pop(job_number, ()):
            self._give_up(job_number, table)

    def hand_over(self, job_number: int, heir: int) -> None:
        """Give a job's blocks, if it has any, to a job without blocks. Neither may be in a
        ``job_set``."""
        assert heir not in self._tables, f"job {heir} has blocks"
        if job_number in self._tables:
            self._tables[heir] = self._tables.pop(job_number)
            self._firsts[heir] = self._firsts.pop(job_number)

    def table(self, job_number: int, kind: int = 0) -> array[int]:
        """The job's block numbers for a kind, in order of position and then of groups. The caller
        must not change it."""
        return self._tables[job_number][kind]

    def first(self, job_number: int, kind: int = 0) -> int:
        """With which block of a group the job's table for a kind begins."""
        return self._firsts[job_number][kind]

    def blocks_at(self, job_number: int, kind: int, places: Sequence[int]) -> array[int]:
        """The blocks at these places, as in ``grow_from``."""
        first = self._firsts[job_number][kind] * self.kinds[kind].num_groups
        table = self._tables[job_number][kind]
        if isinstance(places, range):
            return table[places.start - first : places.stop - first]
        return array("i", [table[place - first] for place in places])

    def all_blocks(self, job_number: int) -> Blocks:
        """The numbers of the job's blocks of all kinds."""
        tables = self._tables.get(job_number)
        if tables is None:
            return _NO_BLOCKS
        if len(tables) == 1:
            return np.array(tables[0], np.int32)
        return np.concatenate([np.array(table, np.int32) for table in tables])

    def is_shared_at(self, job_number: int, block: int) -> bool:
        """Whether another job has this block of any group of the job, which has it too."""
        counts = self.references.counts
        return any(
            counts[number] > 1
            for index, kind in enumerate(self.kinds)
            for number in self.blocks_at(
                job_number, index, range(block * kind.num_groups, (block + 1) * kind.num_groups)
            )
        )

    def unseen_blocks(self, job_number: int, position: int) -> Blocks:
        """The numbers of those blocks of the job that no token from ``position`` on sees."""
        blocks = [
            block
            for kind, num_unseen in enumerate(self._num_unseen(job_number, position))
            for block in self._tables[job_number][kind][:num_unseen]
        ]
        return np.array(blocks, np.int32)

    def end(self, job_number: int) -> int:
        """The first block of a group behind those that the job has, of any kind."""
        if job_number not in self._tables:
            return 0
        return max(self._end(job_number, kind) for kind in range(len(self.kinds)))

    # --- Contents -----------------------------------------------------------------------------

    def publish(self, job_number: int, keys: Sequence[bytes], start: int = 0) -> None:
        """Let others find blocks of the job. If another block has the same content, that one is
        found.

        Args:
            keys: of the job's first blocks of a group. The ranks fill these before any work that is
                sent from now on.
            start: the first block of a group to publish.
        """
        if not keys:
            return
        for kind, table in enumerate(self._tables.get(job_number, ())):
            first, num_groups = self._firsts[job_number][kind], self.kinds[kind].num_groups
            begin = max(first, start)
            stop = min(len(keys), first + len(table) // num_groups)
            for index in range((begin - first) * num_groups, (stop - first) * num_groups):
                key = keys[first + index // num_groups], kind, index % num_groups
                if key not in self._published and table[index] not in self._keys:
                    self._published[key] = table[index]
                    self._keys[table[index]] = key

    def withdraw(self, job_number: int) -> None:
        """Nobody else gets the job's blocks: their content is wrong."""
        for block in self.all_blocks(job_number).tolist():
            self._withdraw(block)

    def has(self, key: bytes, kind: int = 0) -> bool:
        """Whether each group of the kind has a block that is published under this key."""
        num_groups = self.kinds[kind].num_groups
        if num_groups == 1:  # the usual case, without a generator
            return (key, kind, 0) in self._published
        return all((key, kind, group) in self._published for group in range(num_groups))

    def num_cached(self, keys: Sequence[bytes], parts: Sequence[range]) -> int:
        """How many of the blocks of ``refer_to`` no job has."""
        return sum(
            self._published[key, kind, group] in self._cached
            for kind, part in enumerate(parts)
            for key in keys[part.start : part.stop]
            for group in range(self.kinds[kind].num_groups)
        )

    # --- Several jobs -------------------------------------------------------------------------

    def job_set(self) -> JobSet:
        """A new set, which is empty."""
        return self.references.job_set()

    def set_member(self, jobs: JobSet, job_number: int, is_member: bool) -> None:
        """Add the job to a set of this pool, or remove it, unless that is so already."""
        if is_member and job_number not in jobs:
            jobs.add(job_number)
        elif not is_member and job_number in jobs:
            jobs.remove(job_number)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts agree with the tables, and each block that no job
        has is free once."""
        free = [*self._free, *self._cached]
        counts = np.zeros(self.num_blocks, np.int32)
        for tables in self._tables.values():
            assert any(tables), "a job without blocks must have no table"
            for kind, table in zip(self.kinds, tables, strict=True):
                assert len(table) % kind.num_groups == 0, "a group lacks a block"
                assert len(set(table)) == len(table), "a job has a block twice"
                counts[table] += 1
        assert list(self.references.counts) == counts.tolist(), "references"
        assert sorted(free) == np.flatnonzero(counts == 0).tolist(), (
            "a block is lost or owned twice"
        )
        assert self.num_shared == np.count_nonzero(counts > 1), "shared blocks"
        assert self._tables.keys() == self._firsts.keys()
        assert self._keys == {block: key for key, block in self._published.items()}
        assert self._cached.keys() <= self._keys.keys(), "a cached block has no key"
        assert self._keys.keys().isdisjoint(self._free), "a published block counts as empty"
        self.references.check_integrity()

    def _find(self, keys: Sequence[bytes], kind: int, places: range) -> list[int]:
        """The published blocks of the first of these places, up to one that is not there."""
        found: list[int] = []
        if keys:
            num_groups = self.kinds[kind].num_groups
            for place in places[: max(0, len(keys) * num_groups - places.start)]:
                block, group = divmod(place, num_groups)
                number = self._published.get((keys[block], kind, group))
                if number is None:
                    break
                found.append(number)
        return found

    def _missing_places(self, job_number: int, num_tokens: int, first_token: int) -> list[range]:
        end = -(-num_tokens // self.block_size)
        is_new = job_number not in self._tables
        missing = []
        for index, kind in enumerate(self.kinds):
            begin = kind.first_seen(first_token, self.block_size)
            if not is_new:
                begin = max(begin, self._end(job_number, index))
            missing.append(range(kind.num_groups * begin, kind.num_groups * max(begin, end)))
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

    def _num_unseen(self, job_number: int, position: int) -> list[int]:
        """For each kind how many blocks of the job no token from ``position`` on sees."""
        num_unseen = []
        for index, first in enumerate(self._firsts.get(job_number, ())):
            kind = self.kinds[index]
            seen = min(kind.first_seen(position, self.block_size), self._end(job_number, index))
            num_unseen.append(kind.num_groups * max(0, seen - first))
        return num_unseen

    def _check_free(self, job_number: int, needed: int) -> None:
        if needed > self.num_free:
            raise OutOfBlocksError(
                f"job {job_number} needs {needed} of {self.num_free} free blocks"
            )

    def _take_free(self, count: int) -> list[int]:
        begin = max(0, len(self._free) - count)
        blocks = self._free[begin:].tolist()
        blocks.reverse()
        del self._free[begin:]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            del self._published[self._keys.pop(block)]
            blocks.append(block)
        return blocks

    def _refer(self, job_number: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
        if blocks:
            self.references.add(job_number, np.array(blocks, np.int32))

    def _give_up(self, job_number: int, blocks: array[int]) -> None:
        # The last block first, so that it is the first to be lost: a block is of use only together
        # with all preceding blocks.
        freed = self.references.drop(job_number, blocks[::-1])
        if not self._keys:
            self._free.extend(freed)
            return
        for block in freed:
            if block in self._keys:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _withdraw(self, block: int) -> None:
        """Nobody finds the block any more. A job has it."""
        if block in self._keys:
            del self._published[self._keys.pop(block)]

    def _forget_if_empty(self, job_number: int) -> None:
        if job_number in self._tables and not any(self._tables[job_number]):
            del self._tables[job_number], self._firsts[job_number]
