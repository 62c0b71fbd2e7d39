"""Each layer, head and row belongs to exactly one rank, as evenly as possible."""

from __future__ import annotations

import itertools

import pytest
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.partition import (
    RankPlace,
    check_parallel,
    layers_of_stages,
    share_of_kv,
    span,
    stage_layers,
)
from fastserve_backend.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st


def largest(counts: tuple[int, ...], table: float) -> float:
    sizes = [float(count) for count in counts]
    sizes[0] += table
    sizes[-1] += table
    return max(sizes)


@given(st.integers(0, 1000), st.integers(1, 16))
def test_spans_are_neighbours_of_nearly_one_size(size: int, count: int) -> None:
    spans = [span(size, index, count) for index in range(count)]
    assert [i for one in spans for i in one] == list(range(size))
    lengths = [len(one) for one in spans]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(1, 12), st.integers(1, 4), st.floats(0.0, 6.0))
def test_no_split_has_a_smaller_largest_stage(layers: int, stages: int, table: float) -> None:
    stages = min(stages, layers)
    split = stage_layers(layers, stages, table)
    assert [layer for one in split for layer in one] == list(range(layers))
    counts = tuple(len(one) for one in split)
    assert min(counts) >= 1
    best = min(
        largest(other, table)
        for other in itertools.product(range(1, layers + 1), repeat=stages)
        if sum(other) == layers
    )
    assert largest(counts, table) == pytest.approx(best)


def test_uneven_numbers_of_layers() -> None:
    assert [len(one) for one in stage_layers(7, 3)] == [3, 2, 2]
    assert [len(one) for one in stage_layers(7, 3, 1.0)] == [2, 3, 2]
    assert [len(one) for one in stage_layers(9, 4, 2.0)] == [2, 3, 3, 1]
    assert stage_layers(5, 1, 9.0) == (range(5),)


def test_large_tables_leave_the_ends_fewer_layers() -> None:
    small = load_model_config("opt-125m", load_format="dummy")
    # Embedding and head are 5.4 layers each.
    assert [len(one) for one in layers_of_stages(small, 2)] == [6, 6]
    assert [len(one) for one in layers_of_stages(small, 3)] == [2, 8, 2]
    large = load_model_config("opt-175b", load_format="dummy")
    assert [len(one) for one in layers_of_stages(large, 2)] == [48, 48]
    assert share_of_kv(large, 8, 2) == 1 / 16
    assert share_of_kv(small, 2, 2) == 6 / 24
    assert share_of_kv(small, 1, 3) == 8 / 12


def test_ranks_are_numbered_stage_by_stage() -> None:
    places = [RankPlace.of(rank, 2, 3) for rank in range(6)]
    assert [(one.stage, one.tensor_rank) for one in places] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert [one.is_first_stage for one in places] == [True, True, False, False, False, False]
    assert [one.is_last_stage for one in places] == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("model", "tensor_size", "num_stages", "message"),
    [
        (
            "opt-125m", 5, 1,
            "parallel.tensor_parallel_size: got 5; must divide the 12 heads and 12 KV heads of "
            "opt-125m: 1, 2, 3, 4, 6, 12",
        ),
        (
            "smollm2-135m", 9, 1,
            "parallel.tensor_parallel_size: got 9; must divide the 9 heads and 3 KV heads of "
            "smollm2-135m: 1, 3",
        ),
        (
            "opt-125m", 2, 13,
            "parallel.pipeline_parallel_size: got 13; must be from 1 to 12, the layers of opt-125m",
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_with_what_does(
    model: str, tensor_size: int, num_stages: int, message: str
) -> None:
    config = load_model_config(model, load_format="dummy")
    with pytest.raises(ConfigError) as caught:
        check_parallel(config, tensor_size, num_stages)
    assert str(caught.value) == message
    check_parallel(config, 3, 12)
