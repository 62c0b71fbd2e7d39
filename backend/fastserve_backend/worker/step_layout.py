"""Where the tokens of a step lie: a ``Step``'s lists as arrays of one entry a token or a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastserve_backend.rank_protocol.messages import Step

IntArray = npt.NDArray[Any]


@dataclass(frozen=True)
class StepLayout:
    """S jobs with T tokens, job after job; those that decode come first.

    token_ids, positions, slots: int64 [T]. token_ids: of one that the step before chose the index
    from the end of that step's tokens, which is negative. slots: block · block size + offset, where
    a token's key and value go; -1 for padding.
    query_lens, context_lens: int32 [S], tokens of each job in this step, and in the cache after it.
    block_tables: int32 [N], the blocks of each job. table_starts: int32 [S], where a job's begin.
    sampled: int64 [R], the last row of each job that gets a token.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_lens: IntArray
    context_lens: IntArray
    block_tables: IntArray
    table_starts: IntArray
    sampled: IntArray
    num_decodes: int

    @classmethod
    def of(cls, step: Step, block_size: int, num_previous: int = 0) -> StepLayout:
        """
        Args:
            num_previous: tokens that the step before chose.

        Raises:
            IndexError: the step takes a token that the one before did not choose.
        """
        query_lens = np.frombuffer(step.query_lens, dtype=np.int32)
        starts = np.frombuffer(step.starts, dtype=np.int32)
        counts = np.frombuffer(step.block_counts, dtype=np.int32)
        block_tables = np.frombuffer(step.block_ids, dtype=np.int32)
        table_starts = np.cumsum(counts, dtype=np.int32) - counts
        ends = np.cumsum(query_lens)
        positions = np.arange(int(ends[-1])) + np.repeat(starts - (ends - query_lens), query_lens)
        entries = np.repeat(table_starts, query_lens) + positions // block_size
        blocks = block_tables[entries].astype(np.int64)
        return cls(
            token_ids=_token_ids(step, num_previous),
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            query_lens=query_lens,
            context_lens=starts + query_lens,
            block_tables=block_tables,
            table_starts=table_starts,
            sampled=ends[: len(query_lens) - step.num_partial] - 1,
            num_decodes=step.num_decodes,
        )

    @classmethod
    def empty(cls) -> StepLayout:
        """Of no job."""
        by_token, by_job = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        return cls(by_token, by_token, by_token, by_job, by_job, by_job, by_job, by_token, 0)

    @property
    def num_jobs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == self.num_jobs

    @property
    def query_starts(self) -> IntArray:
        """int32 [S + 1]: the first row of each job, and T."""
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

    def padded(self, num_jobs: int) -> StepLayout:
        """With jobs that are padding, so that its arrays but the blocks have the shapes of every
        other step padded to as many. For a step of decodes alone."""
        assert self.only_decodes
        return StepLayout(
            token_ids=_padded(self.token_ids, num_jobs, 0),
            positions=_padded(self.positions, num_jobs, 0),
            slots=_padded(self.slots, num_jobs, -1),
            query_lens=_padded(self.query_lens, num_jobs, 1),
            context_lens=_padded(self.context_lens, num_jobs, 0),
            block_tables=self.block_tables,
            table_starts=_padded(self.table_starts, num_jobs, 0),
            sampled=self.sampled,
            num_decodes=num_jobs,
        )


def _token_ids(step: Step, num_previous: int) -> IntArray:
    token_ids = np.frombuffer(step.token_ids, dtype=np.int32).astype(np.int64)
    if step.previous_rows:
        rows = np.frombuffer(step.previous_rows, dtype=np.int32)
        if rows.max() >= num_previous:
            raise IndexError(
                f"step {step.step_id} takes token {rows.max()} of the step before it, which chose "
                f"{num_previous}"
            )
        decoded = token_ids[: step.num_decodes]
        decoded[:] = np.where(rows >= 0, rows - num_previous, decoded)
    return token_ids


def _padded(array: IntArray, size: int, value: int) -> IntArray:
    padded = np.full(size, value, dtype=array.dtype)
    padded[: len(array)] = array
    return padded
