"""The cores that threads of real ranks keep."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from fastserve_backend.system.cores import num_cores
from fastserve_backend.worker.cores import cores_to_keep
from parallel_models import started_ranks

ALL = sorted(os.sched_getaffinity(0))
needs_cores = pytest.mark.skipif(
    num_cores() < len(ALL) or len(ALL) % 2 > 0,
    reason="two ranks of all cores need an even number of them, and no limit of CPU time",
)


@pytest.fixture(autouse=True)
def no_choice_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)


def kept_cores(pid: int) -> list[int]:
    """Those that the threads of a process keep, of one thread after the other."""
    kept = []
    for thread in sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()):
        with suppress(ProcessLookupError):  # it has just ended
            cores = os.sched_getaffinity(thread)
            kept += cores if len(cores) == 1 else []
    return kept


@needs_cores
@pytest.mark.parametrize(
    ("bind", "kept"), [(None, ALL), ("false", [])], ids=["default", "not-bound"]
)
def test_each_thread_keeps_a_core(
    bind: str | None, kept: list[int], small_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bind is not None:
        monkeypatch.setenv("OMP_PROC_BIND", bind)
    with started_ranks(small_opt) as (executor, ready):
        ((process, _),) = executor._ranks._started
        assert kept_cores(process.pid) == kept
    assert f"{len(ALL)} threads" in ready.hardware


@needs_cores
def test_openmp_may_bind_the_threads_itself(
    small_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It binds the main thread when torch is imported, which must not hide the other cores."""
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    with started_ranks(small_opt) as (_, ready):
        assert f"{len(ALL)} threads" in ready.hardware


@needs_cores
def test_ranks_divide_the_cores(small_opt: Path) -> None:
    with started_ranks(small_opt, tensor_parallel_size=2) as (executor, _):
        kept = [kept_cores(process.pid) for process, _ in executor._ranks._started]
    assert kept == [ALL[: len(ALL) // 2], ALL[len(ALL) // 2 :]]


@needs_cores
def test_a_rank_of_one_of_several_models_keeps_none(small_opt: Path) -> None:
    """The ranks of the other models do not say which cores they would keep."""
    with started_ranks(small_opt, host_share=0.5) as (executor, _):
        ((process, _),) = executor._ranks._started
        assert kept_cores(process.pid) == []


def test_the_cores_of_a_host_are_dealt_out_or_free() -> None:
    allowed = [2, 3, 6, 7]
    assert cores_to_keep(4, 0, 1, allowed) == [2, 3, 6, 7]
    assert [cores_to_keep(2, rank, 2, allowed) for rank in range(2)] == [[2, 3], [6, 7]]
    assert cores_to_keep(1, 0, 1, allowed) == ()  # it may go to a free one
    assert cores_to_keep(1, 2, 3, allowed) == ()
