"""Layers are divided into groups of equal size, and blocks are counted for what tokens see."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise

import pytest
from fastserve_backend.checkpoints.layer_groups import LayerGroups
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind
from hypothesis import given
from hypothesis import strategies as st

WINDOWS = st.lists(st.sampled_from([None, 128, 512, 1024]), min_size=1, max_size=60)


def windows_of(pattern: list[int | None], num_layers: int) -> list[int | None]:
    return [pattern[layer % len(pattern)] for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "kinds", "depth"),
    [
        (windows_of([None], 24), ONE_GROUP, 24),
        (windows_of([4096], 32), (LayerKind(4096, 1),), 32),
        (windows_of([4096, None], 26), (LayerKind(None, 1), LayerKind(4096, 1)), 13),
        (windows_of([512] * 5 + [None], 26), (LayerKind(None, 1), LayerKind(512, 6)), 4),
        # Eight groups of a kind at most, though one layer alone has no window.
        ([None, *windows_of([128], 31)], (LayerKind(None, 1), LayerKind(128, 8)), 4),
    ],
    ids=["llama", "mistral", "gemma2", "gemma3", "uneven"],
)
def test_groups_of_models(
    windows: list[int | None], kinds: tuple[LayerKind, ...], depth: int
) -> None:
    groups = LayerGroups.of(windows)
    assert (groups.kinds, groups.depth()) == (kinds, depth)


@given(windows=WINDOWS, data=st.data())
def test_each_layer_of_each_stage_has_a_place_of_its_own(
    windows: list[int | None], data: st.DataObject
) -> None:
    groups = LayerGroups.of(windows)
    cuts = data.draw(st.lists(st.integers(1, len(windows)), max_size=3))
    bounds = sorted({0, len(windows), *cuts})
    for begin, end in pairwise(bounds):
        layers = range(begin, end)
        places = groups.places(layers)
        assert len(set(places)) == len(layers)
        assert max(number for _, number in places) < groups.depth(layers) <= groups.depth()
        for layer, (group, _) in zip(layers, places, strict=True):
            assert groups.kinds[groups.kind_of_group[group]].window == windows[layer]
    sizes = Counter(groups.group_of)
    assert sorted(sizes) == list(range(len(groups.kind_of_group)))
    of_kinds = Counter(groups.kind_of_group)
    assert max(of_kinds.values()) <= 8
    for group, size in sizes.items():  # layers of a kind are divided evenly
        same_kind = [g for g in sizes if groups.kind_of_group[g] == groups.kind_of_group[group]]
        assert size >= max(sizes[g] for g in same_kind) - 1


def test_a_job_ten_windows_long_needs_little_more_than_a_window_of_windowed_groups() -> None:
    needs = BlockNeeds(16, (LayerKind(None, 1), LayerKind(512, 6)), step_tokens=256)
    assert needs.computed(5120) == 5120 // 16 + 6 * 512 // 16
    assert needs.computed(100) == 7 * 7
    assert needs.most(5120) == 320 + 6 * (1 + -(-(511 + 256) // 16))
    assert needs.most(160) == 7 * 10


def test_the_longest_job_is_the_one_whose_blocks_just_fit() -> None:
    needs = BlockNeeds(16, (LayerKind(None, 1), LayerKind(32, 2)), step_tokens=16)
    longest = needs.longest_job(100)
    assert needs.most(longest) <= 100 < needs.most(longest + 1)
    only_windows = BlockNeeds(16, (LayerKind(32, 2),), step_tokens=16)
    assert only_windows.longest_job(10) == sys.maxsize
    assert only_windows.longest_job(7) == 3 * 16
    assert BlockNeeds(16).longest_job(100) == 1600


@given(
    window=st.integers(1, 50),
    first=st.integers(0, 300),
    count=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_no_step_needs_more_than_the_most(
    window: int, first: int, count: int, block_size: int
) -> None:
    kinds = (LayerKind(None, 1), LayerKind(window, 2))
    needs = BlockNeeds(block_size, kinds, step_tokens=count)
    assert needs.for_step(first, first + count) <= needs.most(first + count)
    seen = kinds[1].first_seen(first, block_size)
    assert seen * block_size <= max(0, first - window + 1)
    assert (seen + 1) * block_size > max(0, first - max(2, window) + 1)
