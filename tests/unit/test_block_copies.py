"""Copies of KV blocks: neighbours are copied together, in either order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fastserve_backend.worker.kv_store import neighbour_runs


@pytest.mark.parametrize(
    ("blocks", "others", "count"),
    [
        ([], [], 0),
        ([3], [9], 1),
        ([3, 4, 5], [9, 10, 11], 1),
        ([5, 4, 3], [11, 10, 9], 1),  # the order of blocks that were kept for others
        ([4, 3, 5], [10, 9, 11], 1),
        ([3, 4, 5], [11, 10, 9], 3),
        ([3, 4, 6], [9, 10, 11], 2),
        ([3, 3, 4], [9, 11, 12], 2),  # two jobs copy the same
    ],
)
def test_neighbours_on_both_sides_are_one_copy(
    blocks: Sequence[int], others: Sequence[int], count: int
) -> None:
    found = list(neighbour_runs(blocks, others))
    assert len(found) == count
    pairs = [
        pair
        for ours, theirs in found
        for pair in zip(range(ours.start, ours.stop), range(theirs.start, theirs.stop), strict=True)
    ]
    assert sorted(pairs) == sorted(zip(blocks, others, strict=True))
