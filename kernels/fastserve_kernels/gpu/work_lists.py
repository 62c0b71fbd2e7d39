"""What there is to do in an attention kernel, as lists that the host builds.

A kernel whose programs take their work from a list needs no grid that follows the lengths of the
jobs, and no program for work that is not there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPLIT_TOKENS = 256
"""Tokens of context in one item of decode work, for every batch. Were it chosen by batch, the order
in which a job's sums are added, and so its last bits, would depend on the jobs beside it."""


def num_splits(context_lens: ArrayLike) -> NDArray[np.int64]:
    """Items of decode work that rows of these context lengths make, one number a row."""
    lengths: NDArray[np.int64] = np.asarray(context_lens, dtype=np.int64)
    return -(-lengths // SPLIT_TOKENS)


def decode_work(context_lens: ArrayLike, capacity: int) -> NDArray[np.int32]:
    """Work list of `paged_decode.paged_decode`, to be copied to the device as it is.

    context_lens: [B], tokens that each row attends to, 0 for padding. capacity: the items that the
    list has room for; a captured CUDA graph is launched with lists of one capacity.

    Returns int32 [1 + B + 2 * capacity]: the number of items; for each row the items of the rows
    before it; then the items, pairs (row, split), those of the most tokens first. What lies past
    the last item is zero.

    Programs take every n-th item: of a list whose items get ever shorter, no program has more than
    one item's tokens beyond another's. In the order of the rows some would get full splits alone,
    and others what is left of contexts behind them.

    Raises ValueError if the rows make more than `capacity` items.
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
    """The capacity of a list of `decode_work` with work_size elements, for that many rows."""
    return (work_size - 1 - rows) // 2


def prefill_work(
    query_lens: ArrayLike, tile: int, context_lens: ArrayLike | None = None
) -> NDArray[np.int32]:
    """Work list of `paged_prefill.paged_prefill`: each job's rows in tiles of `tile` rows.

    query_lens: [S], rows of each job. context_lens: [S], tokens in the cache with those rows, by
    default query_lens, which is right for whole prompts.

    Returns int32 [n, 2], pairs (job, tile of it), those that attend to the most tokens first: begun
    last, a long one would keep the device waiting.
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
