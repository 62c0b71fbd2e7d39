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


def num_splits(context_lens: ArrayLike, window: int | None = None) -> NDArray[np.int64]:
    """How many items of decode work each row makes, by its context length: all splits that its
    window touches."""
    lengths: NDArray[np.int64] = np.asarray(context_lens, dtype=np.int64)
    return -(-lengths // SPLIT_TOKENS) - _first_visible(lengths, window) // SPLIT_TOKENS


def _first_visible(lengths: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """The first position to which the last row of each context attends."""
    return np.maximum(lengths - window, 0) if window is not None else np.zeros_like(lengths)


def decode_work(
    context_lens: ArrayLike, capacity: int, window: int | None = None
) -> NDArray[np.int32]:
    """The work list of `paged_decode.paged_decode`, in the form that the device reads.

    context_lens: [B], tokens of each row's context; 0 for padding.
    capacity: how many items the list has room for. All lists for a captured CUDA graph have the
        same capacity.
    window: that of the layers' rule. A list without one serves layers of any rule, with items for
        which a window leaves nothing to do.

    Returns int32 [1 + B + 2 * capacity]:

    - the number of items;
    - for each row the number of items of the rows before it, less the splits before its window: its
      split s is the scratch's item of this number plus s;
    - the items, pairs (row, split), those with the most tokens first; then zeros.

    Each of n programs takes every n-th item. Since items get ever shorter, the work of two programs
    differs by at most one item's tokens. In the order of rows, some programs would only get full
    splits, and others only the short ends of contexts.

    Raises:
        ValueError: the rows make more than `capacity` items.
    """
    lengths: NDArray[np.int64] = np.asarray(context_lens, dtype=np.int64)
    splits = num_splits(lengths, window)
    rows, count = splits.size, int(splits.sum())
    if count > capacity:
        raise ValueError(f"{count} items of decode work, but room for {capacity}")
    first = _first_visible(lengths, window)
    of_split_0 = np.cumsum(splits) - splits - first // SPLIT_TOKENS
    row = np.repeat(np.arange(rows), splits)
    split = np.arange(count) - of_split_0[row]
    start = np.maximum(split * SPLIT_TOKENS, first[row])
    tokens = np.minimum(lengths[row], (split + 1) * SPLIT_TOKENS) - start
    order = np.argsort(-tokens, kind="stable")
    work = np.zeros(1 + rows + 2 * capacity, dtype=np.int32)
    work[0] = count
    work[1 : 1 + rows] = of_split_0
    items = work[1 + rows :].reshape(capacity, 2)[:count]
    items[:, 0], items[:, 1] = row[order], split[order]
    return work


def decode_capacity(work_size: int, rows: int) -> int:
    """The capacity of a list that `decode_work` made, with work_size elements for so many rows."""
    return (work_size - 1 - rows) // 2


def num_tiles(query_lens: ArrayLike, tile: int) -> NDArray[np.int64]:
    """How many items of prefill work each job makes, by its rows."""
    lengths: NDArray[np.int64] = np.asarray(query_lens, dtype=np.int64)
    return -(-lengths // tile)


def prefill_work(
    query_lens: ArrayLike,
    tile: int,
    context_lens: ArrayLike | None = None,
    window: int | None = None,
    capacity: int | None = None,
) -> NDArray[np.int32]:
    """The work list of `paged_prefill.paged_prefill`: each job's rows in tiles of `tile` rows.

    query_lens: [S], rows of each job; 0 for one without work.
    context_lens: [S], tokens in the cache, including those rows; by default query_lens, which is
        right for whole prompts.
    window: that of the layers' rule. It only changes the order.
    capacity: how many items the list has room for; by default as many as there are. All lists for
        a captured CUDA graph have the same capacity.

    Returns int32 [1 + 2 * capacity]:

    - the number of items;
    - the items, pairs (job, tile of the job); then zeros. Those that attend to the most tokens come
      first: at the end, a long one would leave the rest of the device idle.

    Raises:
        ValueError: the rows make more than `capacity` items.
    """
    lengths = np.asarray(query_lens, dtype=np.int64)
    contexts = lengths if context_lens is None else np.asarray(context_lens, dtype=np.int64)
    tiles = num_tiles(lengths, tile)
    count = int(tiles.sum())
    if capacity is None:
        capacity = count
    if count > capacity:
        raise ValueError(f"{count} items of prefill work, but room for {capacity}")
    jobs = np.repeat(np.arange(lengths.size), tiles)
    tile_of_job = np.arange(jobs.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    last_rows = np.minimum((tile_of_job + 1) * tile, lengths[jobs])
    before = contexts[jobs] - lengths[jobs]
    ends = before + last_rows
    attended = ends - _first_visible(before + tile_of_job * tile + 1, window)
    order = np.argsort(-attended, kind="stable")
    work = np.zeros(1 + 2 * capacity, dtype=np.int32)
    work[0] = count
    items = work[1:].reshape(capacity, 2)[:count]
    items[:, 0], items[:, 1] = jobs[order], tile_of_job[order]
    return work


def prefill_capacity(work_size: int) -> int:
    """The capacity of a list that `prefill_work` made, with work_size elements."""
    return (work_size - 1) // 2
