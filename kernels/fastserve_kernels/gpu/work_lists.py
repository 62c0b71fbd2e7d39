"""Work lists for the attention kernels, which the host builds.

Programs take their work from a list. So the grid need not follow the jobs' lengths, and has no
programs for work that does not exist.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPLIT_TOKENS = 256
"""Tokens of context in one item of decode work. It is the same for every batch: otherwise the order
of a job's sums, and so its last bits, would depend on the jobs beside it."""


def num_splits(context_lens: ArrayLike) -> NDArray[np.int64]:
    """How many items of decode work each row makes, by its context length."""
    lengths: NDArray[np.int64] = np.asarray(context_lens, dtype=np.int64)
    return -(-lengths // SPLIT_TOKENS)


def decode_work(context_lens: ArrayLike, capacity: int) -> NDArray[np.int32]:
    """The work list of `paged_decode.paged_decode`, in the form that the device reads.

    context_lens: [B], tokens that each row attends to; 0 for padding.
    capacity: how many items the list has room for. All lists for a captured CUDA graph have the
        same capacity.

    Returns int32 [1 + B + 2 * capacity]:

    - the number of items;
    - for each row the number of items of the rows before it;
    - the items, pairs (row, split), those with the most tokens first; then zeros.

    Each of n programs takes every n-th item. Since items get ever shorter, the work of two programs
    differs by at most one item's tokens. In the order of rows, some programs would only get full
    splits, and others only the short ends of contexts.

    Raises:
        ValueError: the rows make more than `capacity` items.
    """
    splits = num_splits(context_lens)
    rows, count = splits.size, int(splits.sum())
    if count > capacity:
        raise ValueError(f"{count} items of decode work, but room for {capacity}")
    before = np.cumsum(splits) - splits
    row = np.repeat(np.arange(rows), splits)
    split = np.arange(count) - before[row]
    tokens = np.minimum(np.asarray(context_lens)[row] - split * SPLIT_TOKENS, SPLIT_TOKENS)
    order = np.argsort(-tokens, kind="stable")
    work = np.zeros(1 + rows + 2 * capacity, dtype=np.int32)
    work[0] = count
    work[1 : 1 + rows] = before
    items = work[1 + rows :].reshape(capacity, 2)[:count]
    items[:, 0], items[:, 1] = row[order], split[order]
    return work


def decode_capacity(work_size: int, rows: int) -> int:
    """The capacity of a list that `decode_work` made, with work_size elements for so many rows."""
    return (work_size - 1 - rows) // 2


def prefill_work(
    query_lens: ArrayLike, tile: int, context_lens: ArrayLike | None = None
) -> NDArray[np.int32]:
    """The work list of `paged_prefill.paged_prefill`: each job's rows in tiles of `tile` rows.

    query_lens: [S], rows of each job.
    context_lens: [S], tokens in the cache, including those rows; by default query_lens, which is
        right for whole prompts.

    Returns int32 [n, 2], pairs (job, tile of the job). Those that attend to the most tokens come
    first: at the end, a long one would leave the rest of the device idle.
    """
    lengths = np.asarray(query_lens, dtype=np.int64)
    contexts = lengths if context_lens is None else np.asarray(context_lens, dtype=np.int64)
    tiles = -(-lengths // tile)
    jobs = np.repeat(np.arange(lengths.size), tiles)
    tile_of_job = np.arange(jobs.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    last_rows = np.minimum((tile_of_job + 1) * tile, lengths[jobs])
    attended = contexts[jobs] - lengths[jobs] + last_rows
    order = np.argsort(-attended, kind="stable")
    work: NDArray[np.int32] = np.stack([jobs[order], tile_of_job[order]], axis=1).astype(np.int32)
    return work
