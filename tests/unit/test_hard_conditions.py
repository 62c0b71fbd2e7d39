"""What `make test-hard` reads from a run, and what it prints."""

from __future__ import annotations

from hard_conditions import Run, conditions, outcomes, report

LOG = """
tests/unit/test_one.py::test_a PASSED
FAILED tests/unit/test_one.py::test_a[x y]@tests/support/server] - AssertionError: not - here
FAILED tests/unit/test_one.py::test_b@test_one.py
=========== 2 failed, 1200 passed, 4 skipped in 700.00s (0:11:40) ============
ERROR tests/kernels/gpu/test_c.py::test_d[{'a': 1}] - ValueError
30 passed, 1 skipped, 1 error in 9.00s
"""


def test_counts_of_all_runs_of_pytest_are_added() -> None:
    counts, failed = outcomes(LOG, 2)
    assert counts == {"passed": 1230, "skipped": 5}
    assert failed == [
        "tests/kernels/gpu/test_c.py::test_d[{'a': 1}]",
        "tests/unit/test_one.py::test_a[x y]",
        "tests/unit/test_one.py::test_b",
    ]


def test_a_run_that_fails_without_a_failed_test_is_a_failure() -> None:
    assert outcomes("make: *** [Makefile:1: test] Killed", 2)[1] == ["make test: exit code 2"]
    assert outcomes("5 passed in 1.00s", 0) == ({"passed": 5, "skipped": 0}, [])


def test_the_report_names_failures_by_test_and_condition() -> None:
    runs = [
        Run("busy", 7, 12.34, {"passed": 9, "skipped": 1}, []),
        Run("quota", 8, 20.0, {"passed": 7, "skipped": 1}, ["t.py::b", "t.py::a"]),
    ]
    lines = report(runs).splitlines()
    assert "| busy | 7 | 12.3 | 9 | 1 | 0 |" in lines
    assert lines[-2:] == ["| t.py::a | quota | 8 |", "| t.py::b | quota | 8 |"]


def test_no_two_conditions_are_the_same() -> None:
    settings = [
        (one.environment, one.prefix, one.busy, one.cgroups, one.cold)
        for one in conditions().values()
    ]
    assert all(one not in settings[:place] for place, one in enumerate(settings))
    assert len(settings) == 10


def test_conditions_add_up() -> None:
    every = conditions()
    both = every["nice"] + every["one-thread"] + every["quota"]
    assert both.environment == {"OMP_NUM_THREADS": "1"}
    assert (list(both.prefix), both.busy, both.cold) == (["nice", "-n", "19"], True, False)
    assert both.cgroups == every["quota"].cgroups
