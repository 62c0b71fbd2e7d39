"""`make gpu-check` as far as a CPU allows: a dry run of all phases, its JSON and its table."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_for

# This imports no torch, as the workers of `CaseRuns` import this module.
from benchmarks.gpu import check, goals, phase_list
from benchmarks.gpu import gpu_report as report
from benchmarks.gpu.case_runs import CaseRuns
from benchmarks.gpu.host_memory import available_gib
from benchmarks.gpu.phase_context import CheckFailed, Context, Recorder

# The setup of a test may be both calls.
pytestmark = pytest.mark.timeout(2400)

# Limit for a program to import torch, or to end.
START_S = 200.0
CALL_MINUTES = 15
"""Limit for a dry run, which a busy machine may slow down a lot."""
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu" / "check.py"
CALLS = {
    "a": ["machine", "correctness", "parity", "step", "kernels"],
    "b": ["serving", "swap", "strategies", "limit_128", "flashinfer", "flex"],
}
"""Phases of the two calls of docs/gpu.md."""
PHASES = [name for names in CALLS.values() for name in names]
GPU_MACHINE = Path(sys.prefix) / "gpu-machine"
"""What `make gpu-machine` fetches."""


def run(*arguments: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the program as a user starts it.

    Args:
        first: code that runs before it.
    """
    return subprocess.run(
        command(*arguments, first=first), capture_output=True, text=True, timeout=500
    )


def command(*arguments: str, first: str) -> list[str]:
    code = (
        f"import runpy, sys; sys.argv = {[str(PROGRAM), *arguments]}; "
        f"sys.path.insert(0, {str(ROOT)!r})\n{first}\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    )
    return [sys.executable, "-c", code]


def lease(
    name: str, output: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a call's script, with the packages of a GPU machine if they are there."""
    wheels, packages = GPU_MACHINE / "wheels", GPU_MACHINE / "packages"
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(output), "COMMIT": "abc1234"}
    environment["WHEELS"] = str(wheels) if wheels.is_dir() else ""
    if packages.is_dir():
        path = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), path)))
    script = ROOT / "benchmarks" / "gpu" / f"lease_{name}.sh"
    return subprocess.run(
        ["bash", str(script), *arguments],
        env=environment | variables, capture_output=True, text=True,
        timeout=(CALL_MINUTES + 2) * 60,
    )  # fmt: skip


def dry_call(name: str, output: Path) -> dict[str, Any]:
    done = lease(name, output, "--tiny", MINUTES=str(CALL_MINUTES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in output.iterdir() if path.suffix == ".txt"} == {
        "log.txt", "machine.txt"
    }  # fmt: skip
    machine = (output / "machine.txt").read_text()
    assert machine.count("memory left: ") == 2  # before and after the phases
    assert all(
        word in machine for word in ("cores: ", "ulimit -l: ", "gcc: ", "torch ", "huge pages: ")
    )
    (path,) = output.glob("*.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.fixture(scope="module")
def call_a(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a dry run of the first call."""
    return dry_call("a", tmp_path_factory.mktemp("a"))


@pytest.fixture(scope="module")
def call_b(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dry_call("b", tmp_path_factory.mktemp("b"))


@pytest.fixture(scope="module")
def dry_run(call_a: dict[str, Any], call_b: dict[str, Any]) -> dict[str, Any]:
    """The JSON of both calls as if it were of one."""
    return call_a | {"phases": call_a["phases"] + call_b["phases"]}


def test_a_call_has_its_phases_and_the_commit(call_a: dict[str, Any]) -> None:
    assert [phase["name"] for phase in call_a["phases"]] == CALLS["a"]
    assert call_a["commit"] == "abc1234"


def test_the_other_call_has_the_other_phases(call_b: dict[str, Any]) -> None:
    assert [phase["name"] for phase in call_b["phases"]] == CALLS["b"]


def test_calls_run_with_the_versions_of_a_gpu_machine(dry_run: dict[str, Any]) -> None:
    if not GPU_MACHINE.is_dir():
        pytest.skip("`make gpu-machine` was not run, or failed: other versions were tried")
    wanted = (ROOT / "benchmarks" / "gpu" / "versions.txt").read_text().splitlines()
    pairs = dict(line.split("==") for line in wanted if not line.startswith("#"))
    assert pairs.keys() == {"triton", "numpy"}
    assert {name: dry_run["versions"][name] for name in pairs} == pairs


def test_every_phase_passes_and_leaves_figures(dry_run: dict[str, Any]) -> None:
    assert dry_run["schema"] == 1
    assert dry_run["dry_run"] is True
    assert [phase["name"] for phase in dry_run["phases"]] == PHASES
    for phase in dry_run["phases"]:
        if phase["name"] == "flashinfer" and find_spec("flashinfer") is None:
            assert phase["error"] == "needs flashinfer-python: pip install flashinfer-python"
            continue
        assert (phase["status"], phase["error"]) == ("passed", None), phase
        assert phase["rows"]
        assert phase["host_gib_left"] > 0
    assert {phase["name"] for phase in dry_run["phases"] if phase["is_check"]} == {
        "correctness",
        "parity",
    }
    assert {"date", "command", "commit", "versions", "machine", "seconds"} <= dry_run.keys()


def test_every_kernel_was_compared(dry_run: dict[str, Any]) -> None:
    rows = {row["case"]["operation"]: row["figures"] for row in rows_of(dry_run, "correctness")}
    assert {"paged_decode", "paged_prefill", "kv_write", "rope_kv_write", "kv_int8"} <= rows.keys()
    assert all(row["comparisons"] > 0 and row["wrong"] == 0 for row in rows.values())


def test_tables_of_one_kind_have_the_same_figures(dry_run: dict[str, Any]) -> None:
    for table in {row["table"] for phase in dry_run["phases"] for row in phase["rows"]}:
        figures = {tuple(row["figures"]) for row in rows_of(dry_run, table)}
        assert len(figures) == 1, table


def test_each_way_to_choose_tokens_is_timed(dry_run: dict[str, Any]) -> None:
    choices = [row["case"]["choice"] for row in rows_of(dry_run, "choice of tokens")]
    assert choices == 2 * ["greedy", "random", "top-p 0.9", "top-k 50", "top-k 50, top-p 0.9"]


def test_each_setting_serves_the_same_jobs(dry_run: dict[str, Any]) -> None:
    tables = ("policies under overload", "strategies for preempted jobs' KV")
    loads: dict[Any, set[Any]] = {}
    for row in (row for table in tables for row in rows_of(dry_run, table)):
        case = row["case"]
        loads.setdefault((row["table"], case.get("setting")), set()).add(
            (case["jobs"], case["jobs/s"])
        )
    assert len(loads) == 3
    assert all(len(some) == 1 for some in loads.values()), loads


def test_sdpa_is_timed_in_each_way_or_says_why_not(dry_run: dict[str, Any]) -> None:
    for row in rows_of(dry_run, "paged decode") + rows_of(dry_run, "paged prefill"):
        ways = {name: value for name, value in row["figures"].items() if "SDPA" in name}
        assert {name.partition(", ")[2] for name in ways} == {"", "FLASH", "cuDNN"}
        assert all(value or f"{name[2:]}: " in row["note"] for name, value in ways.items())


def test_each_goal_finds_its_figures(
    dry_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run compares no figure with a goal. On a GPU a goal without a figure would be a gap."""

    assert all(goal["measured"] is None and goal["met"] is None for goal in dry_run["goals"])
    rows = [row for phase in dry_run["phases"] for row in phase["rows"]]
    for goal in goals.GOALS:
        if goal.where.get("head dim") == 128 or "model" in goal.where:
            continue  # the dry run has fewer sizes
        if "cuDNN" in goal.name or "FlashInfer" in goal.name:
            continue  # which a CPU does not have
        assert goal.measured(rows) is not None, goal.name


def test_the_worst_figure_counts() -> None:

    rows = [
        {"table": "t", "case": {"n": n}, "figures": {"f": value}}
        for n, value in ((1, 0.9), (1, 0.7), (2, 0.1), (1, None))
    ]
    least = goals.Goal("", "t", "f", must=0.7, stretch=0.9, where={"n": 1})
    assert (least.measured(rows), least.evaluate(rows)["met"]) == (0.7, True)
    most = goals.Goal("", "t", "f", must=0.7, stretch=0.1, where={"n": (1, 2)}, at_most=True)
    assert (most.measured(rows), most.evaluate(rows)["met"]) == (0.9, False)


def test_the_table_has_phases_goals_and_figures(dry_run: dict[str, Any]) -> None:
    text = report.markdown(dry_run)
    assert "its figures mean nothing" in text
    for phase in PHASES:
        assert f"| {phase} | {'skipped: needs' if phase == 'flashinfer' else 'passed |'}" in text
    assert "| paged decode, D 128, share of the read rate | ≥ 80.0% | ≥ 90.0% | – |  |" in text
    assert "**Policies under overload**" in text
    measured = dry_run | {
        "goals": [
            {"name": "speed", "at_most": False, "percent": True, "must": 0.8, "stretch": 0.9,
             "measured": 0.85, "met": True},
            {"name": "gap, ms", "at_most": True, "percent": False, "must": 0.5, "stretch": 0.1,
             "measured": 0.75, "met": False},
        ]
    }  # fmt: skip
    text = report.markdown(measured)
    assert "| speed | ≥ 80.0% | ≥ 90.0% | 85.0% | met |" in text
    assert "| gap, ms | ≤ 0.5 | ≤ 0.1 | 0.75 | **missed** |" in text


def without(document: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != part}


def test_documentation_takes_whole_runs_on_gpus_alone(
    dry_run: dict[str, Any], tmp_path: Path
) -> None:
    docs = tmp_path / "performance.md"
    docs.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    results = tmp_path / "results"
    results.mkdir()
    report.update_docs(results, docs)
    assert docs.read_text() == (
        f"before\n{report.BEGIN}\n\n{report.NO_RUN}\n\n{report.END}\nafter\n"
    )
    path = results / "gpu.json"
    path.write_text(json.dumps(dry_run))
    with pytest.raises(report.ReportError, match="dry run"):
        report.update_docs(results, docs)
    path.write_text(json.dumps(dry_run | {"schema": 0}))
    with pytest.raises(report.ReportError, match="schema is 0, not 1"):
        report.update_docs(results, docs)
    path.write_text("{")
    with pytest.raises(report.ReportError, match="is no JSON"):
        report.update_docs(results, docs)
    whole = dry_run | {"dry_run": False}
    parts = ["dry_run", "machine", "phases", "goals"]
    damaged = [*({**whole, part: None} for part in parts[1:]), *(without(whole, p) for p in parts)]
    for document in [[], None, *damaged]:
        path.write_text(json.dumps(document))
        with pytest.raises(report.ReportError, match=r"gpu\.json: .*; run again"):
            report.update_docs(results, docs)
    path.write_text(json.dumps(whole))
    report.update_docs(results, docs)
    assert "**Paged decode**" in docs.read_text()
    docs.write_text("no markers")
    with pytest.raises(report.ReportError, match="are not there"):
        report.update_docs(results, docs)


def test_the_documentation_is_that_of_the_recorded_runs() -> None:
    text = report.DOCS.read_text(encoding="utf-8")
    written = text[text.index(report.BEGIN) + len(report.BEGIN) : text.index(report.END)]
    assert written.strip() == report.all_markdown(), "run benchmarks.gpu.gpu_report"


def test_a_phase_whose_packages_are_missing_is_skipped(tmp_path: Path) -> None:
    arguments = ("--tiny", "--only", "machine", "swap", "serving", "--output", str(tmp_path))
    hide = (
        "import importlib.util as util; found = util.find_spec; "
        "util.find_spec = lambda name: None if name in ('msgspec', 'zmq') else found(name)"
    )
    done = run(*arguments, first=hide)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    machine, serving, swap = json.loads(path.read_text())["phases"]
    assert machine["status"] == "passed"
    assert (swap["status"], serving["status"]) == ("skipped", "skipped")
    assert swap["error"] == "needs msgspec: pip install msgspec"
    assert serving["error"] == "needs msgspec, pyzmq: pip install msgspec pyzmq"
    assert "skipped" in done.stdout


def test_what_a_package_needs_itself_is_missed_too(monkeypatch: pytest.MonkeyPatch) -> None:

    hidden = ("pydantic_core", "typing_inspection", "markupsafe")
    monkeypatch.setattr(
        phase_list, "find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    (serving,) = (phase for phase in phase_list.PHASES if phase.name == "serving")
    # Both of the first two are missing, as pydantic accepts a single version of pydantic-core.
    assert serving.missing_packages() == [
        "pydantic", "pydantic-core", "typing-inspection", "markupsafe"
    ]  # fmt: skip


def test_a_phase_that_fails_is_recorded(tmp_path: Path) -> None:
    arguments = ("--tiny", "--only", "serving", "--output", str(tmp_path))
    done = run(*arguments, "--sharegpt", str(tmp_path / "missing.csv"))
    (path,) = tmp_path.iterdir()
    (phase,) = json.loads(path.read_text())["phases"]
    assert phase["status"] == "failed"
    assert "missing.csv" in phase["error"]
    assert done.returncode == 0  # no result was wrong


def test_a_check_that_takes_too_long_has_failed(tmp_path: Path) -> None:
    short = (
        "import dataclasses; from benchmarks.gpu import phase_list; phase_list.GRACE_S = 0; "
        "phase_list.CORES = 1; "
        "phase_list.PHASES = "
        "[dataclasses.replace(phase, limit_s=0.3) for phase in phase_list.PHASES]"
    )
    arguments = ("--tiny", "--only", "correctness", "--output", str(tmp_path))
    done = run(*arguments, first=short)
    assert done.returncode == 1
    (path,) = tmp_path.iterdir()
    (phase,) = json.loads(path.read_text())["phases"]
    assert (phase["status"], phase["error"]) == ("timed out", "was ended after 0 s")
    assert "STOPPED: correctness timed out" in done.stdout


def test_what_was_measured_outlives_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    def lose_it_later(_: Any, phase: Any, limit_s: float, records: Path, look: Any) -> int:
        if phase.name == "machine":
            row = {"table": "copies", "case": {}, "figures": {}, "note": ""}
            lines = [json.dumps({"machine": {"name": "a GPU"}}), json.dumps({"row": row}), '{"ro']
            records.write_text("\n".join(lines))
            return 0
        records.write_text(json.dumps({"error": "it fell off the bus"}))
        return int(check.NO_DEVICE)

    monkeypatch.setattr(check._Run, "_exit_code", lose_it_later)
    monkeypatch.setattr(check, "PHASES", check.PHASES[:4])
    assert check.main(["--output", str(tmp_path)]) == 1
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    found = [(one["status"], one["error"], len(one["rows"])) for one in document["phases"]]
    lost = "it fell off the bus"
    # Parity begins beside correctness.
    assert found[:2] == [("passed", None, 1), ("failed", lost, 0)]
    assert found[2] in [("failed", lost, 0), ("skipped", lost, 0)]
    assert found[3] == ("skipped", lost, 0)


def test_phases_multiply_by_float32_whatever_a_container_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "phase_precision.py").write_text(
        "import os, torch\n"
        "def run(context):\n"
        "    figures = {\n"
        "        'torch': torch.get_float32_matmul_precision(),\n"
        "        'libraries': os.environ['NVIDIA_TF32_OVERRIDE'],\n"
        "    }\n"
        "    context.recorder.row('precision', {}, figures)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for variable in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(variable, "1")
    alone = (
        "from benchmarks.gpu import phase_list as phases; phases.Phase.module = 'phase_precision'; "
        "phases.PHASES = (phases.Phase('precision', 60, ()),)"
    )
    done = run("--tiny", "--output", str(tmp_path / "output"), first=alone)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "output").iterdir()
    (row,) = rows_of(json.loads(path.read_text()), "precision")
    assert row["figures"] == {"torch": "highest", "libraries": "0"}


HANGS, DIES = 3, 5


def square_or_hang(number: int) -> int:
    if number == HANGS:
        threading.Event().wait()
    if number == DIES:
        os._exit(1)
    return number**2


def test_cases_after_one_that_hangs_and_one_that_dies_are_run() -> None:

    cases = [0, 1, 3, 4, 5, 6, 7, 9]
    others = set(multiprocessing.active_children())
    with CaseRuns(square_or_hang, cases, num_workers=2) as runs:
        results: list[int] = []
        for result in runs.results(time.monotonic() + 300):
            results.append(result)
            if runs.num_unfinished == 2:
                break
        assert sorted(results) == [0, 1, 16, 36, 49, 81]
        assert list(runs.results(time.monotonic())) == []  # the time is up
        assert runs.under_way == [HANGS, DIES]
        workers = set(multiprocessing.active_children()) - others
        assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


def test_cases_that_are_not_reached_fail_the_check(tmp_path: Path) -> None:
    from benchmarks.gpu import phase_correctness

    context = dry_context(tmp_path, seconds=0.0)
    with pytest.raises(CheckFailed, match=r"the time ended before \d+ cases had; begun: none"):
        phase_correctness.run(context)


def dry_context(directory: Path, seconds: float) -> Context:
    """The context of a phase that runs in this process."""

    from benchmarks.gpu.check_device import find_device

    recorder = Recorder(directory / "records")
    return Context(find_device(tiny=True), recorder, time.monotonic() + seconds, directory)


def test_results_of_timed_calls_are_not_all_in_one_place() -> None:
    import torch

    from benchmarks.gpu.check_device import make_rounds

    addresses: list[int] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    def call() -> torch.Tensor:
        nonlocal most_alive
        result = torch.empty(1000)
        addresses.append(result.data_ptr())
        alive.append(weakref.ref(result))
        most_alive = max(most_alive, sum(one() is not None for one in alive))
        return result

    make_rounds([call] * 4, rounds=5)
    assert len(addresses) == 20
    assert all(len(set(addresses[first : first + 4])) == 4 for first in range(0, 20, 4))
    assert most_alive == 8  # two rounds, however many there are
    assert not any(one() is not None for one in alive)


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run("--only", "machine", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout
    assert not list(tmp_path.iterdir())


def python_that(check: str, directory: Path) -> Path:
    """A stand-in for Python, which runs the shell's commands ``check`` in place of check.py."""
    python = directory / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *check.py*) {check}; esac\n')
    python.chmod(0o755)
    return python


def test_a_call_ends_with_the_checks_exit_code(tmp_path: Path) -> None:
    python = python_that("echo wrong; exit 7", tmp_path)
    done = lease("a", tmp_path / "output", PYTHON=str(python), WHEELS="")
    assert (done.returncode, done.stdout) == (7, "wrong\n")
    assert (tmp_path / "output" / "log.txt").read_text() == "wrong\n"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WHEELS": "/nowhere"}, "no wheels in /nowhere; docs/gpu.md says how"),
        ({"WHEELS": "{broken}"}, "are not for Python 3"),
        ({"MINUTES": "2.5"}, "MINUTES=2.5 is not a whole number above 0"),
        ({"PYTHON": "no-python"}, "no program no-python; set PYTHON"),
        ({"OUT": "/dev/null/out"}, "cannot write to /dev/null/out; set OUT"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_call_that_cannot_begin_says_why(
    tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    (tmp_path / "broken-1-py2-none-any.whl").touch()
    values = {name: value.format(broken=tmp_path) for name, value in variables.items()}
    done = lease("b", tmp_path / "output", "--tiny", **{"WHEELS": ""} | values)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_call_ends_the_check(tmp_path: Path, number: int) -> None:
    noted = tmp_path / "pid"
    python = python_that(f"echo $$ >{noted}; exec sleep 600", tmp_path)
    variables = {"PYTHON": str(python), "WHEELS": "", "OUT": str(tmp_path / "output")}
    call = subprocess.Popen(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "lease_a.sh")], env=os.environ | variables
    )
    try:
        wait_for(lambda: noted.exists() and noted.read_text().endswith("\n"), START_S)
    finally:
        call.send_signal(number)
    call.wait(START_S)
    wait_for(lambda: not is_running(int(noted.read_text())), START_S)


def test_a_full_disk_does_not_end_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_: Any, phase: Any, limit_s: float, records: Path, look: Any) -> int:
        row = {"table": "copies", "case": {"what": phase.name}, "figures": {"n": 1}, "note": ""}
        lines = [{"machine": {"name": "a GPU"}}, {"row": row}]
        records.write_text("\n".join(map(json.dumps, lines)))
        return 0

    def fail(document: Any, output: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(check._Run, "_exit_code", measure)
    monkeypatch.setattr(check, "_write", fail)
    assert check.main(["--only", "machine", "kernels", "--output", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert printed.count("THE JSON IS NOT WRITTEN: [Errno 28] No space left on device") == 1
    assert "| machine | 1 |" in printed
    assert "| kernels | 1 |" in printed


FIRST = "def run(context): context.recorder.row('first', {}, {'n': 1})\n"
LASTS = """
import os, threading
def run(context):
    context.recorder.row('pids', {}, {'pid': os.getpid()})
    threading.Event().wait()
"""
IS_WRONG = """
from benchmarks.gpu.phase_context import CheckFailed
def run(context): raise CheckFailed('a token is wrong')
"""


def phases_of(directory: Path, *phases: tuple[str, str, bool]) -> str:
    """Code that makes these the program's phases.

    Args:
        phases: name, code of its module, whether it is a check.
    """
    for name, text, _ in phases:
        (directory / f"phase_{name}.py").write_text(text)
    made = ", ".join(f"Phase({name!r}, 1000, (), {is_check})" for name, _, is_check in phases)
    return (
        f"import os; os.environ['PYTHONPATH'] = {str(directory)!r}\n"
        "from benchmarks.gpu import phase_list; from benchmarks.gpu.phase_list import Phase\n"
        "Phase.module = property(lambda phase: f'phase_{phase.name}')\n"
        f"phase_list.PHASES = ({made},)"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_keeps_what_was_measured(tmp_path: Path, number: int) -> None:
    first = phases_of(tmp_path, ("first", FIRST, False), ("lasts", LASTS, False))
    output = tmp_path / "output"

    def phases() -> list[dict[str, Any]]:
        """As the file has them."""
        paths = list(output.glob("*.json"))
        return json.loads(paths[0].read_text())["phases"] if paths else []

    process = subprocess.Popen(command("--tiny", "--output", str(output), first=first))
    try:
        wait_for(lambda: [bool(one["rows"]) for one in phases()] == [True, True], START_S)
        wait_for(lambda: phases()[0]["status"] == "passed", START_S)
        process.send_signal(number)
        process.send_signal(number)  # as Ctrl-C does, directly and by way of `timeout`
        code = process.wait(START_S)
    finally:
        process.kill()
    one, other = phases()
    assert (one["status"], one["rows"][0]["figures"]) == ("passed", {"n": 1})
    was_killed = number == signal.SIGKILL
    assert other["status"] == ("running" if was_killed else "interrupted")
    assert code == (-number if was_killed else 1)
    pid = other["rows"][0]["figures"]["pid"]
    wait_for(lambda: not is_running(pid), START_S)  # it does not stay on the GPU


def test_a_phase_does_not_begin_after_its_run_was_killed(tmp_path: Path) -> None:
    (tmp_path / "phase_first.py").write_text(FIRST)
    records = tmp_path / "records"
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.gpu.run_phase", "phase_first",
            "--parent", str(os.getppid()), "--records", str(records), "--scratch", str(tmp_path),
            "--dataset", "", "--seconds", "60", "--tiny",
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])},
        timeout=START_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert not records.exists()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_timed_after_a_wrong_result(tmp_path: Path) -> None:
    first = phases_of(tmp_path, ("wrong", IS_WRONG, True), ("first", FIRST, False))
    done = run("--tiny", "--output", str(tmp_path / "output"), first=first)
    assert done.returncode == 1
    assert "STOPPED: wrong failed" in done.stdout
    (path,) = (tmp_path / "output").iterdir()
    found = [(one["status"], one["error"]) for one in json.loads(path.read_text())["phases"]]
    assert found == [
        ("failed", "a token is wrong"), ("skipped", "wrong failed, so nothing is timed")
    ]  # fmt: skip


def test_the_page_has_each_phase_and_its_limit() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([ab]) \|.*\| (\d+) \|$", text, re.MULTILINE)
    call_of = {name: call for call, names in CALLS.items() for name in names}
    assert rows == [
        (phase.name, call_of[phase.name], f"{phase.limit_s:.0f}") for phase in phase_list.PHASES
    ]


def test_memory_left_is_that_of_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree: 1048576 kB\nMemAvailable: 8388608 kB\n")
    assert available_gib(meminfo, tmp_path / "none") == 8
    for name, text in {
        "memory.max": "max", "memory.current": f"{5 * 2**30}",
        "memory.stat": f"anon 1\ninactive_file {2**30}\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert available_gib(meminfo, tmp_path) == 8
    (tmp_path / "memory.max").write_text(f"{6 * 2**30}")
    assert available_gib(meminfo, tmp_path) == 2


def test_the_hand_written_loop_has_the_models_weights() -> None:
    import torch
    from fastserve_backend.checkpoints.load_config import load_model_config

    from benchmarks.gpu.random_models import MODELS
    from benchmarks.gpu.static_loop import StaticModel

    for name in MODELS:
        config = load_model_config(name, load_format="dummy")
        model = StaticModel(config, torch.bfloat16, torch.device("meta"))
        assert model.num_parameters == config.num_parameters, name


class FlashInfer(types.ModuleType):
    """FlashInfer's two wrappers as its documentation has them. They only look at what they get."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool = False) -> None:
            assert layout == "NHD"

        def plan(
            self, starts: Any, indices: Any, last: Any, heads: int, kv_heads: int, head_dim: int,
            page: int, *, q_data_type: Any, kv_data_type: Any,
        ) -> None:  # fmt: skip
            assert all(one.dtype.itemsize == 4 for one in (starts, indices, last))
            assert starts[0] == 0
            assert starts[-1] == len(indices)
            assert sorted(indices.tolist()) == list(range(len(indices)))
            assert len(last) == len(starts) - 1
            assert all(1 <= one <= page for one in last)
            self.rows = len(last)
            self.cache_shape = (len(indices), 2, page, kv_heads, head_dim)

        def run(self, query: Any, cache: Any) -> Any:
            assert tuple(cache.shape) == self.cache_shape
            assert len(query) == self.rows
            return query.clone()

    class BatchPrefillWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, query_starts: Any, *arguments: Any, causal: bool, **keys: Any) -> None:
            assert causal
            super().plan(*arguments, **keys)
            self.rows = query_starts[-1]


def test_flashinfer_gets_what_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import phase_flashinfer

    monkeypatch.setitem(sys.modules, "flashinfer", FlashInfer("flashinfer"))
    phase_flashinfer.run(dry_context(tmp_path, seconds=60))
    rows = [json.loads(line)["row"] for line in (tmp_path / "records").read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["figures"]["× FlashInfer"] > 0 for row in rows), rows


# Modules of torch, including "cuda" in CUDA builds, and of triton.
OF_OTHERS = {"cuda", "cython_runtime", "mpmath", "sympy", "torchgen", "tqdm", "typing_extensions"}


@pytest.mark.parametrize(
    "names",
    [
        ("machine", "kernels", "flex"),
        ("correctness",),
        ("swap",),
        ("step", "serving", "strategies", "limit_128"),
    ],
    ids=str,
)
def test_phases_import_no_more_than_they_say(names: tuple[str, ...]) -> None:
    """If other imports are missing, a phase fails instead of being skipped."""

    (declared,) = {phase.modules for phase in phase_list.PHASES if phase.name in names}
    support = ROOT / "tests" / "support"
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(support)]}; before = set(sys.modules); "
        f"import {', '.join(f'benchmarks.gpu.phase_{name}' for name in names)}; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr
    own = {"benchmarks", *(path.stem for path in support.glob("*.py"))}
    others = {
        name
        for name in done.stdout.split()
        if name not in sys.stdlib_module_names
        and not name.startswith(("fastserve_", "_cython_", "_sysconfigdata", "__mp_"))
    }
    assert others - own <= {*declared, *OF_OTHERS}


def rows_of(document: dict[str, Any], table: str) -> list[dict[str, Any]]:
    return [row for phase in document["phases"] for row in phase["rows"] if row["table"] == table]
