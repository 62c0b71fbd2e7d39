"""``make test-hard``: the whole suite under hostile conditions, each time in another random order.

    make test-hard                              # every condition once, for hours
    make test-hard HARD="busy quota --runs 3"   # these two, three times each
    make test-hard HARD="user+avx2+one-thread"  # all three at once

Each run is `make test`, whose output goes to build/hard. At the end come two tables: the runs, and
what failed by test and condition. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path

from busy_cores import busy_cores

ROOT = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup")
QUOTA = 0.6
"""Of all cores' time."""
QUOTA_PERIOD_US = 100_000
DISK_BYTES_A_SECOND = 10 << 20
# Takes the place of the compiler: for a processor of 2013, whatever this machine's can do.
AVX2_COMPILER = """#!/bin/sh
for one; do
    shift
    case $one in
    -march=native) set -- "$@" -march=haswell ;;
    *) set -- "$@" "$one" ;;
    esac
done
exec g++ "$@"
"""
_OUTCOME = re.compile(r"^(FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", re.MULTILINE)
# Workers add it to a test's name, see `sharing`.
_GROUP = re.compile(r"@[\w./-]+\]?$")
_COUNT = re.compile(r"(\d+) (passed|skipped)")


class NotHere(Exception):
    """The machine does not offer the condition. The message says why."""


@dataclass(frozen=True)
class Condition:
    """What is hostile in a run. ``{new}`` in a value is a new, empty directory."""

    what: str
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()
    """Command that runs the tests."""
    busy: bool = False
    """Other processes want all cores, all the time."""
    cgroups: Sequence[tuple[str, Mapping[str, str]]] = ()
    """Controllers of Linux, and their settings."""
    cold: bool = False
    """No file is in memory when the run begins."""

    def __add__(self, other: Condition) -> Condition:
        return Condition(
            f"{self.what}; {other.what}",
            {**self.environment, **other.environment},
            [*self.prefix, *other.prefix],
            self.busy or other.busy,
            [*self.cgroups, *other.cgroups],
            self.cold or other.cold,
        )


def _disk() -> str:
    number = os.stat(tempfile.gettempdir()).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def conditions() -> dict[str, Condition]:
    cores = len(os.sched_getaffinity(0))
    quota_us = str(round(QUOTA * cores * QUOTA_PERIOD_US))
    disk = f"{_disk()} {DISK_BYTES_A_SECOND}"
    return {
        "order": Condition("a random order alone"),
        "busy": Condition("other processes want all cores", busy=True),
        "nice": Condition(
            "the others come first: nice 19 beside them", prefix=("nice", "-n", "19"), busy=True
        ),
        "quota": Condition(
            f"{QUOTA:.0%} of the CPU time",
            cgroups=[("cpu", {"cpu.cfs_quota_us": quota_us})],
        ),
        "disk": Condition(
            f"a disk of {DISK_BYTES_A_SECOND >> 20} MiB/s, and nothing of it in memory",
            cgroups=[
                (
                    "blkio",
                    {
                        "blkio.throttle.read_bps_device": disk,
                        "blkio.throttle.write_bps_device": disk,
                    },
                )
            ],
            cold=True,
        ),
        "empty-cache": Condition(
            "no compiled kernels, profiles or other caches",
            {"HOME": "{new}", "XDG_CACHE_HOME": "{new}/cache"},
        ),
        "user": Condition(
            "not root",
            prefix=("unshare", "--user", "--map-user=1000", "--map-group=1000"),
        ),
        "one-thread": Condition("OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}),
        "avx2": Condition(
            "kernels and torch for AVX2",
            {
                "CXX": "{new}/c++-for-avx2",
                "ATEN_CPU_CAPABILITY": "avx2",
                "ONEDNN_MAX_CPU_ISA": "AVX2",
            },
        ),
        "plain-torch": Condition("no C++ kernels", {"FASTSERVE_CPU_KERNELS": "torch"}),
    }


@dataclass
class Run:
    condition: str
    seed: int
    minutes: float
    counts: dict[str, int]
    failed: list[str]


def outcomes(log: str, code: int) -> tuple[dict[str, int], list[str]]:
    """How many tests passed and were skipped, and the names of those that failed.

    Args:
        log: all that `make test` printed, which runs several times pytest.
        code: its exit code. If it failed although no test did, that is what failed.
    """
    counts = {"passed": 0, "skipped": 0}
    for number, outcome in _COUNT.findall(log):
        counts[outcome] += int(number)
    failed = sorted({_GROUP.sub("", name) for _, name in _OUTCOME.findall(log)})
    if code and not failed:
        failed = [f"make test: exit code {code}"]
    return counts, failed


@contextmanager
def _cgroup(controller: str, settings: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Yields a command that runs another one in a new cgroup with these settings."""
    group = CGROUPS / controller / f"fastserve-hard-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        hint = "with version 2 of cgroups, try `systemd-run --scope -p CPUQuota=… make test`"
        raise NotHere(f"{error.strerror}: {group}; {hint}") from error
    try:
        try:
            for name, value in settings.items():
                (group / name).write_text(value)
        except OSError as error:
            raise NotHere(f"{group} takes no {settings}: {error}") from error
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def _variables(condition: Condition, directory: Path) -> dict[str, str]:
    new = str(directory)
    (directory / "c++-for-avx2").write_text(AVX2_COMPILER)
    (directory / "c++-for-avx2").chmod(0o700)
    return {name: value.format(new=new) for name, value in condition.environment.items()}


def run_under(name: str, condition: Condition, seed: int, log: Path) -> Run:
    """Raises NotHere."""
    with ExitStack() as stack:
        command = [*condition.prefix, "make", "test"]
        if shutil.which(command[0]) is None:
            raise NotHere(f"there is no `{command[0]}`")
        new = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hard-")))
        variables = _variables(condition, new)
        variables["PYTEST_ADDOPTS"] = f"--random-order {seed} --color no"
        for controller, settings in condition.cgroups:
            command = [*stack.enter_context(_cgroup(controller, settings)), *command]
        if condition.cold:
            _forget_files()
        if condition.busy:
            stack.enter_context(busy_cores())
        began_s = time.monotonic()
        with log.open("w") as out:
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | variables, stdout=out, stderr=out
            )
        minutes = (time.monotonic() - began_s) / 60
    counts, failed = outcomes(log.read_text(errors="replace"), done.returncode)
    return Run(name, seed, minutes, counts, failed)


def _forget_files() -> None:
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise NotHere(f"only root may empty the page cache: {error}") from error


def report(runs: Sequence[Run]) -> str:
    """Both tables, as Markdown."""
    lines = ["| condition | seed | minutes | passed | skipped | failed |", "|---" * 6 + "|"]
    for run in runs:
        cells = (
            run.condition,
            run.seed,
            f"{run.minutes:.1f}",
            run.counts["passed"],
            run.counts["skipped"],
            len(run.failed),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    failures = sorted((test, run.condition, run.seed) for run in runs for test in run.failed)
    if failures:
        lines += ["", "| failed | condition | seed |", "|---" * 3 + "|"]
        lines += [f"| {test} | {name} | {seed} |" for test, name, seed in failures]
    return "\n".join(lines)


def main() -> int:
    every = conditions()
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(
            ["conditions:", *(f"  {name}: {one.what}" for name, one in every.items())]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="CONDITION[+CONDITION…]",
        help="one or several at once; default: each alone",
    )
    parser.add_argument("--runs", type=int, default=1, help="of each condition")
    parser.add_argument("--seed", type=int, help="of the order of tests; default: random")
    args = parser.parse_args()
    unknown = {one for name in args.names for one in name.split("+")} - every.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(every)}")
    directory = ROOT / "build" / "hard"
    directory.mkdir(parents=True, exist_ok=True)
    runs = []
    for _ in range(args.runs):
        for name in args.names or every:
            seed = random.randrange(10_000) if args.seed is None else args.seed
            log = directory / f"{name}-{seed}.log"
            try:
                condition = reduce(add, (every[one] for one in name.split("+")))
                run = run_under(name, condition, seed, log)
            except NotHere as error:
                print(f"{name}: not on this machine: {error}", flush=True)
                continue
            runs.append(run)
            print(f"{name}: {run.minutes:.1f} min, {len(run.failed)} failed: {log}", flush=True)
            for test in run.failed:
                print(f"  {shlex.quote(test)}", flush=True)
    print(report(runs))
    return int(any(run.failed for run in runs))


if __name__ == "__main__":
    sys.exit(main())
