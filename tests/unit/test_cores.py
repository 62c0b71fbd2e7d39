"""The number of cores that a container leaves to the ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fastserve_backend.system.cores import num_cores
from fastserve_backend.worker import cores
from fastserve_backend.worker.cores import num_threads

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", ALL), ("100000 100000", 1), ("50000 100000", 1), ("9999999 100000", ALL)],
)
def test_a_quota_leaves_fewer(quota: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert num_cores(tmp_path / "cpu.max") == expected


def test_a_quota_is_rounded_up(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("110000 100000\n")
    assert num_cores(tmp_path / "cpu.max") == min(ALL, 2)


def test_without_a_container_there_are_all(tmp_path: Path) -> None:
    assert num_cores(tmp_path / "cpu.max") == ALL


def test_ranks_and_models_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: 12)
    assert num_threads(1.0, 1) == 12
    assert num_threads(1.0, 5) == 2
    assert num_threads(1 / 3, 2) == 2
    assert num_threads(0.01, 4) == 1
