"""Proves and measures the GPU engine on this machine: ``make gpu-check``.

    python3 benchmarks/gpu/check.py                      # all, in at most 8 minutes
    python3 benchmarks/gpu/check.py --only kernels swap  # only these phases, kept apart
    python3 benchmarks/gpu/check.py --tiny               # dry run on a CPU, which measures nothing

Needs torch and triton; a phase that needs more says what is missing, and is skipped. Whole runs are
written to benchmarks/results/gpu/ and to docs/performance_gpu.md.
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
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

# A program that is started by its path has its own folder first in sys.path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.gpu_report import RESULTS, SCHEMA, file_name, markdown, update_docs
from benchmarks.gpu.phase_list import GRACE_S, PHASES, RESERVE_S, Phase

ROOT = Path(__file__).resolve().parents[2]
APART = ROOT / "build" / "gpu-check"
"""Where the JSON of partial runs goes."""
PACKAGES = ("torch", "triton", "numpy", "transformers", "msgspec", "pyzmq", "pydantic")
NO_DEVICE = 3  # exit code of run_phase
# NVIDIA's container images have torch multiply float32 as TF32, but our limits are float32's. The
# first variable is torch's, the second that of NVIDIA's libraries.
WITHOUT_TF32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    chosen = [phase for phase in PHASES if arguments.only is None or phase.name in arguments.only]
    is_whole = arguments.only is None and not arguments.tiny
    started_s = time.monotonic()
    command = shlex.join(
        ["python3", "benchmarks/gpu/check.py", *(sys.argv[1:] if argv is None else argv)]
    )
    phases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fastserve-gpu-check-") as scratch:
        run = _Run(arguments, Path(scratch), started_s)
        # A dry run's times mean nothing, so two phases may run at once.
        with ThreadPoolExecutor(2 if arguments.tiny else 1) as pool:
            try:
                for outcome in pool.map(run.run, chosen):
                    phases.append(outcome)
                    # Written after each phase, so that a later kill loses nothing.
                    if arguments.output is not None and run.machine:
                        _write(run.document(command, phases), arguments.output)
            except BaseException:
                run.end()
                raise
    if run.no_device is not None and not run.machine:
        print(f"no CUDA device: {run.no_device}; --tiny tries the program without one")
        return 2
    if all(phase["status"] == "skipped" for phase in phases):
        print("nothing was run")
        return 2
    is_recorded = is_whole and arguments.output is None and bool(run.machine)
    output = RESULTS if is_recorded else arguments.output or APART
    document = run.document(command, phases)
    path = _write(document, output)
    print(f"\n{markdown(document)}\nwritten: {path}")
    if is_recorded:
        print(f"written: {update_docs()}")
    return int(
        any(one["is_check"] and one["status"] not in ("passed", "skipped") for one in phases)
    )


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
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (8)")
    parser.add_argument("--tiny", action="store_true", help="dry run on a CPU, of tiny sizes")
    return parser.parse_args(argv)


class _Run:
    """Runs phases, each in a process of its own and within its time."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path, started_s: float) -> None:
        self.machine: dict[str, Any] = {}
        """The machine, as the phases describe it."""
        self.no_device: str | None = None
        """Why there is no device, or none any more. Then no phase runs."""
        self._arguments, self._scratch, self._started_s = arguments, scratch, started_s
        self._processes: list[subprocess.Popen[bytes]] = []

    def end(self) -> None:
        """Ends the run at once; may be called from any thread."""
        for process in self._processes:
            _end(process)

    def document(self, command: str, phases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The run's JSON, with the phases that have ended so far."""
        rows = [row for outcome in phases for row in outcome["rows"]]
        return {
            "schema": SCHEMA,
            "dry_run": self._arguments.tiny,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "commit": _commit(),
            "versions": _versions(),
            "machine": self.machine,
            "seconds": round(time.monotonic() - self._started_s, 1),
            "phases": list(phases),
            # A dry run's figures are compared with nothing.
            "goals": [goal.evaluate([] if self._arguments.tiny else rows) for goal in GOALS],
        }

    def run(self, phase: Phase) -> dict[str, Any]:
        """Runs a phase; returns its part of the JSON."""
        left_s = self._arguments.minutes * 60 - RESERVE_S - (time.monotonic() - self._started_s)
        limit_s = min(phase.limit_s, left_s)
        outcome: dict[str, Any] = {
            "name": phase.name,
            "is_check": phase.is_check,
            "status": "skipped",
            "error": None,
            "seconds": 0.0,
            "limit_s": round(limit_s, 1),
            "rows": [],
        }
        if self.no_device is not None:
            outcome["error"] = self.no_device
            return outcome
        missing = phase.missing_packages()
        if missing:
            outcome["error"] = f"needs {', '.join(missing)}: pip install {' '.join(missing)}"
        elif limit_s <= GRACE_S:
            outcome["error"] = "the phases before it took all the time"
        else:
            self._run_process(phase, limit_s, outcome)
        reason = f": {outcome['error']}" if outcome["error"] else ""
        print(f"{phase.name}: {outcome['status']}, {outcome['seconds']:.0f} s{reason}", flush=True)
        return outcome

    def _run_process(self, phase: Phase, limit_s: float, outcome: dict[str, Any]) -> None:
        print(f"{phase.name}:", flush=True)
        started_s = time.monotonic()
        records = self._scratch / f"{phase.name}.jsonl"
        records.touch()
        code = self._exit_code(phase, limit_s, records)
        outcome["seconds"] = round(time.monotonic() - started_s, 1)
        for line in records.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # its process was ended while it wrote the last one
                break
            if "row" in record:
                outcome["rows"].append(record["row"])
            self.machine |= record.get("machine", {})
            outcome["error"] = record.get("error", outcome["error"])
        if code == 0:
            outcome["status"] = "passed"
        elif code is None:
            outcome["status"], outcome["error"] = "timed out", f"was ended after {limit_s:.0f} s"
        else:
            outcome["status"] = "failed"
            outcome["error"] = outcome["error"] or f"its process ended with {code}"
        if code == NO_DEVICE:
            self.no_device = outcome["error"]

    def _exit_code(self, phase: Phase, limit_s: float, records: Path) -> int | None:
        """Runs the phase; returns its exit code, or None if it was killed after ``limit_s``."""
        command = [
            sys.executable, "-m", "benchmarks.gpu.run_phase", phase.module,
            "--records", str(records), "--scratch", str(self._scratch),
            "--dataset", self._arguments.sharegpt, "--seconds", str(limit_s - GRACE_S),
        ]  # fmt: skip
        tiny = self._arguments.tiny
        # A session of its own, so that the processes that it starts can be ended with it.
        process = subprocess.Popen(
            command + ["--tiny"] * tiny, env=self._environment(), start_new_session=True
        )
        self._processes.append(process)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._processes.remove(process)
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


def _write(document: Mapping[str, Any], output: Path) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    path = output / file_name(document)
    path.write_text(_as_table(document) + "\n", encoding="utf-8")
    return path


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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
