"""The race against other engines: its workers, whether they are set up, and its tables."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from fastserve_bench.connection import Request
from fastserve_bench.outcome import Failure, FailureKind, LoadOutcome
from fastserve_bench.report.records import JobRecord
from fastserve_bench.session import Load, Run
from fastserve_client.errors import ConnectionFailed, ServerError

from benchmarks.peers import against_others
from benchmarks.peers.worker_process import WorkerProcess

# Each job's tokens are its prompt's numbers plus 1, plus 2 and so on. 13 in a prompt is an error.
STUB = """
import sys
from benchmarks.peers.worker import Lines, serve_steps

class Stub:
    def __init__(self):
        self.jobs = {}
    def add(self, job):
        print("noise on standard output")
        self.jobs[job.number] = [job, 0]
    def has_jobs(self):
        return bool(self.jobs)
    def step(self):
        tokens = []
        for number, entry in list(self.jobs.items()):
            entry[1] += 1
            if 13 in entry[0].prompt:
                lines.write_error("unlucky")
            tokens.append((number, sum(entry[0].prompt) + entry[1]))
            if entry[1] == entry[0].max_tokens:
                del self.jobs[number]
        return tokens

lines = Lines()
lines.write_ready("pytest")
serve_steps(Stub(), lines)
"""


async def stub(tmp_path: Path, code: str = STUB) -> WorkerProcess:
    return await WorkerProcess.start([sys.executable, "-c", code], tmp_path / "stub.log")


async def test_a_worker_answers_jobs_that_run_together(tmp_path: Path) -> None:
    worker = await stub(tmp_path)
    assert worker.name == f"pytest {pytest.__version__}"
    answers = await asyncio.gather(
        *(worker.answer(Request([100 * n], 5, exact=True)) for n in range(1, 4))
    )
    assert [one.token_ids for one in answers] == [
        [100 * n + i for i in range(1, 6)] for n in range(1, 4)
    ]
    assert all(one.times_s == sorted(one.times_s) and len(one.times_s) == 5 for one in answers)
    timed = await worker.send(Request([1, 2], 3, exact=True), timeout_s=60)
    assert (timed.prompt_tokens, timed.output_tokens) == (2, 3)
    await worker.close()
    assert "noise" in (tmp_path / "stub.log").read_text()


async def test_an_error_fails_this_job_and_later_ones(tmp_path: Path) -> None:
    worker = await stub(tmp_path)
    with pytest.raises(ServerError, match="unlucky"):
        await worker.answer(Request([13], 5, exact=True))
    with pytest.raises(ConnectionFailed, match="unlucky"):
        await worker.answer(Request([1], 5, exact=True))
    await worker.close()


async def test_an_engine_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match=r"did not start; see .*stub\.log"):
        await stub(tmp_path, "raise SystemExit('no such model')")
    assert "no such model" in (tmp_path / "stub.log").read_text()


def test_a_peer_that_is_not_set_up_says_how_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for peer in against_others.PEERS.values():
        assert against_others.interpreter_of(peer) is None
        assert f"run: benchmarks/peers/{peer}.sh setup" in capfd.readouterr().err


def test_a_peer_that_is_set_up_has_its_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = against_others.ROOT / "benchmarks" / "peers" / "openvino.sh"
    version = next(
        line.partition("=")[2]
        for line in script.read_text().splitlines()
        if line.startswith("readonly VERSION=")
    )
    environment = tmp_path / "fastserve" / "peers" / f"openvino-genai-{version}"
    environment.mkdir(parents=True)
    (environment / ".installed").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Does nothing, because it was done before.
    subprocess.run([script, "setup"], check=True)
    assert against_others.interpreter_of("openvino") == f"{environment}/bin/python"


def test_decoding_counts_only_while_all_jobs_decode() -> None:
    early, late = [1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]
    # In (2, 4] each of the two has two tokens.
    assert against_others.decoding_speed([early, late]) == 2.0
    assert against_others.decoding_speed([[0.0, 0.25, 0.5]]) == 4.0


def test_slower_than_a_peer_is_a_loss() -> None:
    speeds = {
        "batch 1": {"ours": [10.0, 30.0, 20.0], "theirs": [20.0, 20.0, 20.0]},
        "batch 4": {"ours": [10.0, 30.0, 20.0], "theirs": [20.0, 40.0, 80.0]},
    }
    assert against_others.speed_table(speeds, ["ours"], ["theirs"]).splitlines() == [
        "| tokens/s | ours | theirs | ours ÷ theirs |",
        "| --- | --- | --- | --- |",
        "| batch 1 | 20 [10, 30] | 20 [20, 20] | 1 [0.5, 1.5] |",
        "| batch 4 | 20 [10, 30] | 40 [20, 80] | 0.5 [0.25, 0.75] (loss) |",
    ]


def run(label: str, token_s: float, failures: int = 0) -> Run:
    """A run of one job of ten tokens."""
    record = JobRecord(0.0, None, token_s, 10 * token_s, prompt_tokens=5, output_tokens=10)
    failed = [Failure(0.0, FailureKind.TIMED_OUT, "too slow")] * failures
    return Run(label, Load(rate=2.0), 0, LoadOutcome([record], failed))


def test_shorter_latency_is_a_win_and_failed_jobs_are_not_compared() -> None:
    runs = [run("ours", 0.1), run("theirs", 0.2), run("others", 0.05, failures=3)]
    assert against_others.load_table(runs, ["ours"], ["theirs", "others"]).splitlines()[2:] == [
        "| 2 | ours | 100 | 100 | 100 | 100 |",
        "| 2 | theirs | 200 | 200 | 200 | 200 |",
        "| 2 | others | 3 jobs failed |  |  |  |",
        "| 2 | ours ÷ theirs | 2 | 2 | 2 | 2 |",
    ]


def test_the_command_line_takes_only_known_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert against_others.parse([]).parts == against_others.PARTS
    arguments = against_others.parse(["decode", "load", "--quantization", "int8", "int4"])
    assert arguments.parts == ["decode", "load"]
    assert arguments.quantization == ["int8", "int4"]
    with pytest.raises(SystemExit):
        against_others.parse(["encode"])
    assert "parts are decode, prefill, load" in capsys.readouterr().err
