"""Tests of many parameters: `make test` runs each value of each, `make test-all` all combinations.

A test that is marked ``@pytest.mark.one_of("dtype")`` takes with each combination of its other
parameters the next dtype, not all of them. With ``key``, a function of the value, it takes one of
the values with equal keys. With ``every=3`` it takes every third of those combinations alone, for
what other tests do with all of them.

The mark ``repeated`` is for what other tests do with other random numbers, or with another value
that takes the same path.

A property test with ``@random_examples(150)`` has so many examples in `make test-all`, and a sixth
of them in `make test`. Other tests that do one thing again and again ask ``rounds`` how often.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T", bound=Hashable)

# Each run has other examples. Of ten policies, twenty examples miss one on average.
SHARE, FEWEST = 6, 20

_has_all_examples = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="run tests marked `one_of` with all combinations, those marked `repeated`, and all "
        "random examples",
    )
    parser.addoption("--part", metavar="N/M", help="of every M tests run the Nth alone")


def pytest_configure(config: pytest.Config) -> None:
    global _has_all_examples  # test modules, which ask for it, are imported later
    _has_all_examples = config.getoption("--all-combinations")
    config.addinivalue_line(
        "markers",
        "one_of(parameter, key=None, every=1): one value of it with each combination of the "
        "others, or with every Nth, unless --all-combinations",
    )
    config.addinivalue_line(
        "markers", "repeated: runs with --all-combinations or --endurance alone"
    )
    config.addinivalue_line("markers", "slow: takes seconds, so `make test-fast` leaves it out")


def random_examples(number: int) -> settings:
    """Settings of a property test: the number with --all-combinations, or else a sixth of it."""
    if _has_all_examples:
        return settings(max_examples=number)
    return settings(max_examples=min(number, max(number // SHARE, FEWEST)))


def rounds(few: int, many: int) -> int:
    """How often a test does one thing: ``many`` times with --all-combinations, or else ``few``."""
    return many if _has_all_examples else few


@pytest.hookimpl(trylast=True)  # of what `-k` and `-m` leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-combinations"):
        has_repeated = bool(config.getoption("--endurance"))
        _keep(config, items, set(items) - _left_out(items, has_repeated))
    if part := config.getoption("--part"):
        number, count = map(int, part.split("/"))
        _keep(config, items, set(items[number - 1 :: count]))


def _keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    if left_out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def _left_out(items: list[pytest.Item], has_repeated: bool) -> set[pytest.Item]:
    """Combinations of values that all run in other combinations, and what repeats other tests
    unless ``has_repeated``."""
    # By test and by combination of the other parameters.
    every: dict[str, int] = {}
    matrices: dict[str, dict[object, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if mark := item.get_closest_marker("one_of"):
            test = item.nodeid.partition("[")[0]
            key = mark.kwargs.get("key", lambda _: None)
            matrices[test][_others(item, *mark.args, key)].append(item)
            every[test] = mark.kwargs.get("every", 1)
    left_out = {item for item in items if item.get_closest_marker("repeated") and not has_repeated}
    for test, matrix in matrices.items():
        rows = list(matrix.values())
        left_out.update(*rows)
        left_out -= next_of_each(rows, every[test])
    return left_out


def _others(item: pytest.Item, parameter: str, key: Callable[[object], object]) -> object:
    """Which values the item's other parameters have, and the parameter's key."""
    params = item.callspec.params  # type: ignore[attr-defined]
    # Items of one test share the values, of which some cannot be hashed. pytest's own indices of
    # values count items instead.
    others = {(name, id(value)) for name, value in params.items() if name != parameter}
    return frozenset(others), key(params[parameter])


def next_of_each(rows: list[list[T]], every: int = 1) -> set[T]:
    """From every Nth row the item after the previous such row's choice; of few rows, each item of
    one."""
    rows = rows[::every]
    width = max(map(len, rows))
    taken = set()
    for turn in range(max(len(rows), width)):
        row = rows[turn % len(rows)]
        # Each round moves one further, as another parameter may have as many values.
        taken.add(row[(turn + turn // width) % len(row)])
    return taken
