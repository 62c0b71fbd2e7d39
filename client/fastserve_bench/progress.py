"""The progress bar of a load test."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fastserve_bench.driver import Driver
from fastserve_bench.session import Load


class RunProgress:
    """One bar for the current run. It shows nothing if the console is no terminal."""

    def __init__(self, console: Console, num_runs: int) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._num_runs = num_runs
        self._num_started = 0
        self._task = self.bar.add_task("warming up", total=None, numbers="")

    def start(self, label: str, load: Load, num_jobs: int) -> None:
        self._num_started += 1
        self.bar.reset(
            self._task,
            total=num_jobs,
            description=f"{self._num_started}/{self._num_runs} {label}, {load}",
            numbers="",
        )

    def update(self, driver: Driver) -> None:
        outcome = driver.outcome
        errors = len(outcome.failures)
        speed = driver.num_output_tokens / max(driver.elapsed_s, 1e-9)
        self.bar.update(
            self._task,
            completed=outcome.num_jobs,
            numbers=f"sent {driver.num_sent}  done {len(outcome.records)}  "
            f"{'[red]' if errors else ''}errors {errors}{'[/]' if errors else ''}  "
            f"{speed:.0f} tokens/s",
        )
