"""`make gpu-check` as far as a CPU allows: a dry run of all phases, its JSON and its table."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# This imports no torch, as the workers of `CaseRuns` import this module.
from benchmarks.gpu import check, goals, phase_list
from benchmarks.gpu import gpu_report as report
from benchmarks.gpu.case_runs import CaseRuns
from benchmarks.gpu.phase_context import CheckFailed, Context, Recorder

if TYPE_CHECKING:
    from fastserve_backend.rank_protocol.messages import Ready, Setup

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu" / "check.py"
PHASES = ["machine", "correctness", "parity", "step", "swap", "kernels", "serving", "flex"]


def run(*arguments: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the program as a user starts it.

    Args:
        first: code that runs before it.
    """
    code = (
        f"import runpy, sys; sys.argv = {[str(PROGRAM), *arguments]}; "
        f"sys.path.insert(0, {str(ROOT)!r})\n{first}\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a dry run of everything."""
    output = tmp_path_factory.mktemp("gpu-check")
    done = run("--tiny", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = output.iterdir()
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_every_phase_passes_and_leaves_figures(dry_run: dict[str, Any]) -> None:
    assert dry_run["schema"] == 1
    assert dry_run["dry_run"] is True
    assert [phase["name"] for phase in dry_run["phases"]] == PHASES
    for phase in dry_run["phases"]:
        assert (phase["status"], phase["error"]) == ("passed", None), phase
        assert phase["rows"]
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


def test_each_goal_finds_its_figures(
    dry_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run compares no figure with a goal. On a GPU a goal without a figure would be a gap."""

    assert all(goal["measured"] is None and goal["met"] is None for goal in dry_run["goals"])
    rows = [row for phase in dry_run["phases"] for row in phase["rows"]]
    for goal in goals.GOALS:
        if goal.where.get("head dim") == 128 or "model" in goal.where:
            continue  # the dry run has fewer sizes
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
        assert f"| {phase} | passed |" in text
    assert "| paged decode, D 128, share of the copy rate | ≥ 80.0% | ≥ 90.0% | – |  |" in text
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
    path.write_text(json.dumps(dry_run | {"dry_run": False}))
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
    machine, swap, serving = json.loads(path.read_text())["phases"]
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
        "phase_list.PHASES = "
        "[dataclasses.replace(phase, limit_s=0.3) for phase in phase_list.PHASES]"
    )
    arguments = ("--tiny", "--only", "correctness", "--output", str(tmp_path))
    done = run(*arguments, first=short)
    assert done.returncode == 1
    (path,) = tmp_path.iterdir()
    (phase,) = json.loads(path.read_text())["phases"]
    assert (phase["status"], phase["error"]) == ("timed out", "was ended after 0 s")


def test_what_was_measured_outlives_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    def lose_it_later(_: Any, phase: Any, limit_s: float, records: Path) -> int:
        if phase.name == "machine":
            row = {"table": "copies", "case": {}, "figures": {}, "note": ""}
            lines = [json.dumps({"machine": {"name": "a GPU"}}), json.dumps({"row": row}), '{"ro']
            records.write_text("\n".join(lines))
            return 0
        records.write_text(json.dumps({"error": "it fell off the bus"}))
        return int(check.NO_DEVICE)

    monkeypatch.setattr(check._Run, "_exit_code", lose_it_later)
    monkeypatch.setattr(check, "PHASES", check.PHASES[:3])
    assert check.main(["--output", str(tmp_path)]) == 1
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    found = [(one["status"], one["error"], len(one["rows"])) for one in document["phases"]]
    lost = "it fell off the bus"
    assert found == [("passed", None, 1), ("failed", lost, 0), ("skipped", lost, 0)]


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
        for result in runs.results(time.monotonic() + 60):
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


def test_ranks_that_last_are_made_for_the_largest_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU no batch may be larger than the limit that the first engine's ranks got."""

    from benchmarks.gpu import phase_serving

    class Started(Exception):
        pass

    class Ranks(phase_serving.DistributedExecutor):
        def start(self, setup: Setup, timeout_s: float) -> Ready:
            raise Started(setup)

    monkeypatch.setattr(phase_serving, "DistributedExecutor", Ranks)
    with pytest.raises(Started) as started:
        phase_serving.run(dry_context(tmp_path, seconds=60))
    (setup,) = started.value.args
    assert setup.max_num_seqs == phase_serving.MOST_AUTO_SEQS
    assert setup.max_num_batched_tokens >= setup.max_num_seqs


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run("--only", "machine", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout
    assert not list(tmp_path.iterdir())


# Modules of torch, including "cuda" in CUDA builds, and of triton.
OF_OTHERS = {"cuda", "cython_runtime", "mpmath", "sympy", "torchgen", "tqdm", "typing_extensions"}


@pytest.mark.parametrize(
    "names",
    [("machine", "correctness", "kernels", "flex"), ("swap",), ("step", "serving")],
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
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
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
