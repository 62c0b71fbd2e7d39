"""What `make test` leaves out of a matrix, and how it distributes tests over workers."""

from __future__ import annotations

from itertools import product

import pytest
from matrices import next_of_each, random_examples, rounds


@pytest.mark.parametrize(("num_rows", "width"), list(product(range(1, 8), range(1, 5))))
def test_each_row_and_each_column_is_run(num_rows: int, width: int) -> None:
    rows = [[(row, column) for column in range(width)] for row in range(num_rows)]
    run = next_of_each(rows)
    assert len(run) == max(num_rows, width)
    assert {row for row, _ in run} == set(range(num_rows))
    assert {column for _, column in run} == set(range(width))


@pytest.mark.parametrize("size", [2, 3])
def test_columns_do_not_go_along_with_a_parameter_of_as_many_values(size: int) -> None:
    rows = [
        [(outer, inner, column) for column in range(size)]
        for outer, inner in product(range(size), repeat=2)
    ]
    pairs = {(inner, column) for _, inner, column in next_of_each(rows)}
    assert len(pairs) == size**2


@pytest.mark.one_of("column")
@pytest.mark.parametrize("column", ["left", "right"])
@pytest.mark.parametrize("row", [[1], [2], [3]], ids=str)
def test_a_marked_test_runs_each_row_once(
    row: list[int], column: str, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--all-combinations"):
        pytest.skip("it runs all combinations")
    same = [item for item in request.session.items if item.path == request.path]
    same = [item for item in same if item.originalname == request.node.originalname]  # type: ignore[attr-defined]
    rows = [item.callspec.params["row"] for item in same]  # type: ignore[attr-defined]
    assert row in rows
    assert rows == [one for place, one in enumerate(rows) if one not in rows[:place]]
    if len(rows) == 3:  # no option chose among them
        assert {item.callspec.params["column"] for item in same} == {"left", "right"}  # type: ignore[attr-defined]


def test_every_third_row_has_the_next_column() -> None:
    rows = [[(row, column) for column in "ab"] for row in range(7)]
    assert next_of_each(rows, every=3) == {(0, "a"), (3, "b"), (6, "b")}


@pytest.mark.parametrize(("number", "fewer"), [(150, 25), (60, 20), (20, 20)])
def test_property_tests_have_a_sixth_of_their_examples(
    number: int, fewer: int, request: pytest.FixtureRequest
) -> None:
    has_all = request.config.getoption("--all-combinations")
    assert random_examples(number).max_examples == (number if has_all else fewer)


def test_what_a_test_repeats_is_repeated_less(request: pytest.FixtureRequest) -> None:
    assert rounds(2, many=9) == (9 if request.config.getoption("--all-combinations") else 2)


def test_a_worker_has_the_groups(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("it is no worker of xdist's")
    assert request.node.nodeid.endswith("::test_a_worker_has_the_groups@test_suite.py")
