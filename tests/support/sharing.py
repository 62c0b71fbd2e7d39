"""Distribution over pytest-xdist's workers: tests that share a process run on one worker."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator

import pytest

# Folders in the order in which `-n` hands their tests out. Those that wait for servers come first:
# what is left at the end are short tests, so that the workers end together.
FIRST = ("triton", "gateway", "endurance", "distributed", "engine", "metrics", "kernels")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-order",
        metavar="SEED",
        type=int,
        help="shuffle files, and the tests of each file",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--random-order")
    if seed is not None:
        _shuffle(items, random.Random(seed))
    if not hasattr(config, "workerinput"):
        return  # it is no worker of xdist's
    if seed is None:
        items.sort(key=_turn)
    for item in items:
        # What xdist's scheduler reads, and what xdist 3.8 would make of the mark `xdist_group`, had
        # pytest 9.2 not renamed the attribute.
        item._id = item._id.parse(f"{item.nodeid}@{_group(item)}")  # type: ignore[attr-defined]


def _shuffle(items: list[pytest.Item], rng: random.Random) -> None:
    """A file's tests stay together, as its fixtures would otherwise be made again and again. A
    test's parameters keep their order, from which ``matrices`` chooses."""
    tests = [(item.path, item.nodeid.partition("[")[0]) for item in items]
    places: dict[object, float] = {}
    for path, test in tests:
        for one in (path, test):
            places.setdefault(one, rng.random())
    keys = {
        item: (places[path], places[test]) for item, (path, test) in zip(items, tests, strict=True)
    }
    items.sort(key=keys.__getitem__)


def _turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


def _group(item: pytest.Item) -> str:
    """The first session fixture with something to stop that the test's others are made of, or else
    its file, as modules have fixtures, too."""
    roots = (root for name in item.fixturenames for root in _roots(item, name))  # type: ignore[attr-defined]
    return next(roots, item.path.name)


def _roots(item: pytest.Item, name: str) -> Iterator[str]:
    """Session fixtures with something to stop that the fixture ``name`` is made of, itself if of
    no other."""
    definitions = item._fixtureinfo.name2fixturedefs.get(name)  # type: ignore[attr-defined]
    if not definitions:
        return  # a parameter, or `request`
    fixture = definitions[-1]
    below = [root for one in fixture.argnames if one != name for root in _roots(item, one)]
    yield from below
    if not below and fixture.scope == "session" and inspect.isgeneratorfunction(fixture.func):
        yield f"{fixture.baseid}/{name}"
