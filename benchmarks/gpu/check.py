"""Proves and measures the GPU engine on this machine: ``make gpu-check``.

    python3 benchmarks/gpu/check.py                      # all, in at most 12 minutes
    python3 benchmarks/gpu/check.py --only kernels swap  # only these phases, kept apart
    python3 benchmarks/gpu/check.py --tiny               # dry run on a CPU, which measures nothing

Needs torch and triton; a phase that needs more says what is missing, and is skipped. Nothing is
timed after a wrong result. The JSON is written every second, so a kill loses little. Whole
runs are written to benchmarks/results/gpu/ and to docs/performance_gpu.md.

Exit codes: 1 if a result was wrong or the run was interrupted, 2 if nothing could be run or the
JSON could not be written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

# A program that is started by its path has its own folder first in sys.path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.gpu_report import RESULTS, SCHEMA, file_name, markdown, update_docs
from benchmarks.gpu.host_memory import available_gib
from benchmarks.gpu.phase_list import GRACE_S, PHASES, RESERVE_S, Phase

ROOT = Path(__file__).resolve().parents[2]
APART = ROOT / "build" / "gpu-check"
"""Where the JSON of partial runs goes."""
PACKAGES = ("torch", "triton", "numpy", "transformers", "msgspec", "pyzmq", "pydantic")
NO_DEVICE = 3  # exit code of run_phase
# NVIDIA's container images have torch multiply float32 as TF32, but our limits are float32's. The
# first variable is torch's, the second that of NVIDIA's libraries.
WITHOUT_TF32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}
LOOK_EVERY_S = 1.0
"""Time between two looks at what a phase has measured."""


class Interrupted(BaseException):
    """The program was told to end."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    command = shlex.join(
        ["python3", "benchmarks/gpu/check.py", *(sys.argv[1:] if argv is None else argv)]
    )
    chosen = [phase for phase in PHASES if arguments.only is None or phase.name in arguments.only]
    with tempfile.TemporaryDirectory(prefix="fastserve-gpu-check-") as scratch:
        run = _Run(arguments, command, Path(scratch))
        run.run_all(chosen)
    if run.no_device is not None and not run.machine:
        print(f"no CUDA device: {run.no_device}; --tiny tries the program without one")
        return 2
    if all(phase["status"] == "skipped" for phase in run.phases):
        print("nothing was run")
        return 2
    is_whole = arguments.only is None and not (arguments.tiny or run.was_interrupted)
    is_recorded = is_whole and arguments.output is None and bool(run.machine)
    path = run.save(RESULTS if is_recorded else None)
    print(f"\n{markdown(run.document())}")
    if path is not None:
        print(f"written: {path}")
        if is_recorded:
            print(f"written: {update_docs()}")
    if run.was_interrupted:
        print("INTERRUPTED: later phases did not run")
    if run.wrong_checks:
        print(f"STOPPED: {run.wrong_checks}, so nothing was timed after that")
    if run.was_interrupted or run.wrong_checks:
        return 1
    return 2 if path is None else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [phase.name for phase in PHASES]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PHASE", help=f"of {', '.join(names)}"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where the JSON goes, without a change to the documentation "
        f"({RESULTS.relative_to(ROOT)}, or {APART.relative_to(ROOT)} for what is not a whole run)",
    )
    parser.add_argument(
        "--sharegpt",
        metavar="FILE",
        default="sharegpt",
        help="real lengths (CSV or JSON) instead of the packaged synthetic ones",
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="for everything (12)")
    parser.add_argument("--commit", metavar="HASH", help="of the tree, on a machine without git")
    parser.add_argument("--tiny", action="store_true", help="dry run on a CPU, of tiny sizes")
    return parser.parse_args(argv)


class _Run:
    """Runs phases, each in a process of its own and within its time."""

    def __init__(self, arguments: argparse.Namespace, command: str, scratch: Path) -> None:
        self.phases: list[dict[str, Any]] = []
        """Each phase's part of the JSON, in order; one under way has what it has measured."""
        self.machine: dict[str, Any] = {}
        """The machine, as the phases describe it."""
        self.no_device: str | None = None
        """Why there is no device, or none any more. Then no phase runs."""
        self.was_interrupted = False
        self._arguments, self._command, self._scratch = arguments, command, scratch
        self._started_s = time.monotonic()
        self._commit = arguments.commit or _commit()
        self._versions = _versions()
        self._saving = threading.Lock()
        self._save_error = ""  # the last one printed

    def run_all(self, chosen: Sequence[Phase]) -> None:
        """Runs the phases in their order. Checks run side by side, since they time nothing; each
        other phase has the machine to itself, except in a dry run."""

        def turn(phase: Phase) -> str:
            if phase.is_check:
                return "checks"
            return "timed" if self._arguments.tiny else phase.name

        try:
            for _, some in groupby(chosen, turn):
                self._run_side_by_side(list(some))
        except Interrupted:
            self.was_interrupted = True

    @property
    def wrong_checks(self) -> str:
        """Checks that ran and did not pass, such as "parity timed out"; empty if all passed."""
        return " and ".join(
            f"{phase['name']} {phase['status']}"
            for phase in self.phases
            if phase["is_check"] and phase["status"] in ("failed", "timed out")
        )

    def document(self) -> dict[str, Any]:
        """The run's JSON as it stands."""
        rows = [row for phase in self.phases for row in phase["rows"]]
        return {
            "schema": SCHEMA,
            "dry_run": self._arguments.tiny,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self._command,
            "commit": self._commit,
            "versions": self._versions,
            "machine": self.machine,
            "seconds": round(time.monotonic() - self._started_s, 1),
            "phases": self.phases,
            # A dry run's figures are compared with nothing.
            "goals": [goal.evaluate([] if self._arguments.tiny else rows) for goal in GOALS],
        }

    def save(self, output: Path | None = None) -> Path | None:
        """Writes the JSON as it stands.

        Args:
            output: by default the run's own folder.

        Returns:
            Its path; None if it could not be written. The run goes on, as it prints its figures.
        """
        with self._saving:
            try:
                return _write(self.document(), output or self._arguments.output or APART)
            except OSError as error:
                if str(error) != self._save_error:
                    _print_line(f"THE JSON IS NOT WRITTEN: {error}")
                self._save_error = str(error)
                return None

    def _run_side_by_side(self, some: Sequence[Phase]) -> None:
        outcomes = [self._begin(phase) for phase in some]
        with ThreadPoolExecutor(2) as pool:
            try:
                list(pool.map(self._run, some, outcomes))
            except BaseException:
                self.was_interrupted = True  # which the phases' threads see soon
                raise

    def _begin(self, phase: Phase) -> dict[str, Any]:
        """Adds a phase to the JSON."""
        self.phases.append(
            {
                "name": phase.name,
                "is_check": phase.is_check,
                "status": "skipped",
                "error": None,
                "seconds": 0.0,
                "limit_s": phase.limit_s,
                "host_gib_left": None,
                "rows": [],
            }
        )
        return self.phases[-1]

    def _run(self, phase: Phase, outcome: dict[str, Any]) -> None:
        """Runs a phase, and keeps its part of the JSON up to date."""
        left_s = self._arguments.minutes * 60 - RESERVE_S - (time.monotonic() - self._started_s)
        limit_s = min(phase.limit_here_s(self._arguments.tiny), left_s)
        outcome["limit_s"] = round(limit_s, 1)
        outcome["error"] = self._reason_to_skip(phase, limit_s)
        if outcome["error"] is None:
            self._run_process(phase, limit_s, outcome)
            if self.machine:
                self.save()
        reason = f": {outcome['error']}" if outcome["error"] else ""
        _print_line(f"{phase.name}: {outcome['status']}, {outcome['seconds']:.0f} s{reason}")

    def _reason_to_skip(self, phase: Phase, limit_s: float) -> str | None:
        if self.was_interrupted:
            return "the run was interrupted before it"
        if self.no_device is not None:
            return self.no_device
        if self.wrong_checks and not phase.is_check:
            return f"{self.wrong_checks}, so nothing is timed"
        if missing := phase.missing_packages():
            return f"needs {', '.join(missing)}: pip install {' '.join(missing)}"
        if limit_s <= GRACE_S:
            return "the phases before it took all the time"
        return None

    def _run_process(self, phase: Phase, limit_s: float, outcome: dict[str, Any]) -> None:
        _print_line(f"{phase.name}:")
        started_s = time.monotonic()
        records = self._scratch / f"{phase.name}.jsonl"
        records.touch()
        outcome["status"] = "running"

        def look() -> None:
            outcome["seconds"] = round(time.monotonic() - started_s, 1)
            left_gib = round(available_gib(), 1)
            least_gib = outcome["host_gib_left"]
            outcome["host_gib_left"] = left_gib if least_gib is None else min(least_gib, left_gib)
            self._read(records, outcome)

        code = self._exit_code(phase, limit_s, records, look)
        look()
        if code == 0:
            outcome["status"] = "passed"
        elif self.was_interrupted:
            outcome["status"], outcome["error"] = "interrupted", "the run was interrupted"
        elif code is None:
            is_short = limit_s < phase.limit_here_s(self._arguments.tiny)
            more = "; --minutes gives it more" if is_short else ""
            outcome["status"] = "timed out"
            outcome["error"] = f"was ended after {limit_s:.0f} s{more}"
        else:
            outcome["status"] = "failed"
            outcome["error"] = outcome["error"] or f"its process ended with {code}"
        if code == NO_DEVICE:
            self.no_device = outcome["error"]

    def _read(self, records: Path, outcome: dict[str, Any]) -> None:
        """Takes over what the phase has written so far."""
        rows = []
        for line in records.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the last one is not whole yet, or its process was ended
                break
            if "row" in record:
                rows.append(record["row"])
            self.machine |= record.get("machine", {})
            outcome["error"] = record.get("error", outcome["error"])
        outcome["rows"] = rows

    def _exit_code(
        self, phase: Phase, limit_s: float, records: Path, look: Callable[[], None]
    ) -> int | None:
        """Runs the phase; returns its exit code, or None if it was killed after ``limit_s``.

        Args:
            look: is called now and then; afterwards the JSON is saved.
        """
        command = [
            sys.executable, "-m", "benchmarks.gpu.run_phase", phase.module,
            "--parent", str(os.getpid()), "--records", str(records),
            "--scratch", str(self._scratch), "--dataset", self._arguments.sharegpt,
            "--seconds", str(limit_s - GRACE_S),
        ]  # fmt: skip
        ends_s = time.monotonic() + limit_s
        # A group of its own, so that the processes that it starts can be ended with it.
        process = subprocess.Popen(
            command + ["--tiny"] * self._arguments.tiny, env=self._environment(), process_group=0
        )
        try:
            while not self.was_interrupted and (left_s := ends_s - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(LOOK_EVERY_S, left_s))
                look()
                if self.machine:
                    self.save()
            return None
        finally:
            _end(process)

    def _environment(self) -> dict[str, str]:
        """Variables for a phase, which finds the project without an installation.

        An engine measures its ranks anew and reads no cached profile, except in a dry run.
        """
        folders = (".", "tests/support", "backend", "kernels", "client")
        paths = [*(str(ROOT / name) for name in folders), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | WITHOUT_TF32
        environment |= {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        if self._arguments.tiny:
            return environment | {"TRITON_INTERPRET": "1"}
        return environment | {"XDG_CACHE_HOME": str(self._scratch / "cache")}


def _print_line(text: str) -> None:
    """In one call, so that the lines of two threads do not mix."""
    print(f"{text}\n", end="", flush=True)


def _write(document: Mapping[str, Any], output: Path) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    path = output / file_name(document)
    whole = path.with_suffix(".new")  # a kill must not leave half a file
    whole.write_text(_as_table(document) + "\n", encoding="utf-8")
    return whole.replace(path)


def _as_table(value: Any, indent: str = "") -> str:
    """JSON with a line for each measured row and for each goal."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        items = [_as_table(item, indent + " ") for item in value]
        begin, end = "[]"
    elif isinstance(value, Mapping) and ("phases" in value or "rows" in value):
        items = [f"{json.dumps(key)}: {_as_table(one, indent + ' ')}" for key, one in value.items()]
        begin, end = "{}"
    else:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    lines = ",\n".join(f"{indent} {item}" for item in items)
    return f"{begin}\n{lines}\n{indent}{end}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _versions() -> Mapping[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _commit() -> str | None:
    """Commit of the working tree, with a + if files have changed since; None without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except OSError:
        return None
    return done.stdout.strip() or None


def _interrupt(number: int, frame: object) -> None:
    # Only once: `timeout` passes Ctrl-C on, too, and the phases have to be ended in order.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    raise Interrupted


if __name__ == "__main__":
    # SIGINT as well, because a shell starts background programs with Ctrl-C ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.exit(main())
