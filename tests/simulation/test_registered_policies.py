"""The command line accepts policies that an installed package registers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from installed_policy import environment_with, example, install_policies


def fastserve(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command with what is installed in ``folder``."""
    return subprocess.run(
        [sys.executable, "-m", "fastserve_backend", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment_with(folder),
    )


def simulate(folder: Path, policies: str, *more: str) -> subprocess.CompletedProcess[str]:
    return fastserve(
        folder, "simulate", "opt-125m", "--policies", policies, "--rates", "1", "--num-jobs", "20",
        *more,
    )  # fmt: skip


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why a command was refused."""
    assert done.returncode == 1, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.slow
def test_the_policy_of_the_page_runs_beside_a_built_in_one(tmp_path: Path) -> None:
    install_policies(tmp_path, *example())
    report = tmp_path / "report.json"
    done = simulate(tmp_path, "prompt_deadline,fcfs", "--output", str(report))
    assert done.returncode == 0, done.stderr
    assert "prompt_deadline: at most" in done.stderr
    points = json.loads(report.read_text(encoding="utf-8"))["points"]
    assert {point["label"] for point in points} == {"prompt_deadline", "fcfs"}


@pytest.mark.slow
def test_the_policy_of_the_page_has_priorities(tmp_path: Path) -> None:
    """One seat, and three times as many jobs as it can serve."""
    install_policies(tmp_path, *example())
    done = fastserve(
        tmp_path, "simulate", "opt-125m", "--policies", "prompt_deadline", "--rates", "10",
        "--num-jobs", "60", "--max-num-seqs", "1",
        "--class", "other:0.9,ttft_slo_ms=1000",
        "--class", "urgent:0.1,ttft_slo_ms=1000,priority=-1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "prompt_deadline" in line]
    kept = {line[2]: float(line[5].rstrip("%")) for line in lines[1:]}
    assert kept["urgent"] == 100.0
    assert kept["other"] < 50.0


@pytest.mark.slow
def test_an_unknown_name_is_refused_with_all_that_are_known(tmp_path: Path) -> None:
    install_policies(tmp_path, *example())
    config = tmp_path / "engine.yaml"
    config.write_text("scheduler: {policy: prompt_dedline}\n", encoding="utf-8")
    for done in (
        simulate(tmp_path, "prompt_dedline"),
        fastserve(tmp_path, "serve", "--policy", "prompt_dedline"),
        fastserve(tmp_path, "serve", "--config", str(config)),
    ):
        line = refusal(done)  # may stand in the middle of a list of problems
        assert "invalid configuration" in line
        assert "scheduler.policy: got 'prompt_dedline'; must be one of gittins," in done.stderr
        assert "fcfs, prompt_deadline" in done.stderr


@pytest.mark.slow
def test_an_entry_point_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    entry_points = {
        "no_module": "no_such_module:Policy",
        "no_class": "my_policies:NoSuchClass",
        "no_policy": "my_policies:Job",
    }
    install_policies(tmp_path, example()[0], entry_points)
    for name, reason in {
        "no_module": "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
        "no_class": "cannot be loaded: AttributeError: module 'my_policies' has no attribute",
        "no_policy": "has no classmethod from_config",
    }.items():
        line = refusal(simulate(tmp_path, name))
        entry_point = f"entry point {name} = {entry_points[name]} of the package my-policies"
        assert line.startswith(f"error: scheduler.policy: got {name!r}; {entry_point} {reason}")


@pytest.mark.slow
def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    module, entry_points = example()
    install_policies(tmp_path, module, entry_points | {"fcfs": "my_policies:PromptDeadline"})
    install_policies(tmp_path, module, entry_points, "their-policies")
    line = refusal(simulate(tmp_path, "fcfs"))
    assert "entry point fcfs = my_policies:PromptDeadline of the package my-policies" in line
    assert "registers the name of a built-in policy" in line
    line = refusal(simulate(tmp_path, "prompt_deadline"))
    assert "my-policies and entry point prompt_deadline" in line or "their-policies and" in line
    assert line.endswith("all register it; uninstall all but one")
    assert simulate(tmp_path, "srpt").returncode == 0
