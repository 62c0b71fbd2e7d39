"""The order of loads among servers, and the steps between two loads."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fastserve_bench.command import bench_command
from fastserve_bench.connection import Request, Target, TimedAnswer
from fastserve_bench.report.objectives import Objectives
from fastserve_bench.report.output import Output
from fastserve_bench.session import Load, Plan, Session
from fastserve_bench.workload import Workload
from fastserve_client.errors import WorkloadError

PAUSE_S = 0.2
DEADLINE_S = 60.0
WORKLOAD = Workload("equal:8:4", 2)
LOADS = (Load(concurrency=1), Load(concurrency=2))
REPEATS, WARMUP = 2, 1
NUM_LOADS = len(LOADS) * REPEATS


class Server:
    """Answers at once, and records the time of each request."""

    def __init__(self, label: str, asked: list[tuple[str, float]]) -> None:
        self._label, self._asked = label, asked
        self.prompts: list[str | list[int]] = []

    async def check(self) -> None:
        pass

    async def send(self, request: Request, timeout_s: float) -> TimedAnswer:
        now_s = time.monotonic()
        self._asked.append((self._label, now_s))
        self.prompts.append(request.prompt)
        return TimedAnswer(now_s, now_s, len(request.prompt), request.max_tokens)

    async def close(self) -> None:
        pass


async def asked(*labels: str, pause_s: float) -> list[tuple[str, float]]:
    """The server and the time of each request, in order."""
    times: list[tuple[str, float]] = []
    plan = Plan(
        WORKLOAD, LOADS, REPEATS, timeout_s=1.0, warmup=WARMUP, vocab_size=1000, pause_s=pause_s
    )
    session = Session(plan)
    await session.alternate({label: Server(label, times) for label in labels})
    return times


async def test_servers_take_turns_with_a_pause_and_a_warm_up_before_each_run() -> None:
    times = await asked("a", "b", pause_s=PAUSE_S)
    first_warm_up, turns = times[:2], times[2:]
    assert [label for label, _ in first_warm_up] == ["a", "b"]
    of_a_turn = WARMUP + WORKLOAD.num_jobs
    assert [label for label, _ in turns] == (["a"] * of_a_turn + ["b"] * of_a_turn) * NUM_LOADS
    last_s = first_warm_up[-1][1]
    for number in range(0, len(turns), of_a_turn):
        assert turns[number][1] - last_s >= PAUSE_S
        last_s = turns[number + of_a_turn - 1][1]


async def test_a_server_alone_waits_for_nobody() -> None:
    times = await asyncio.wait_for(asked("a", pause_s=1e6), DEADLINE_S)
    assert len(times) == WARMUP + WORKLOAD.num_jobs * NUM_LOADS


async def test_the_warm_up_sends_texts_that_the_first_run_does_not_begin_with(
    tmp_path: Path,
) -> None:
    texts = [{"instruction": f"Say {number}", "output": "yes"} for number in range(1000)]
    dataset = tmp_path / "alpaca.json"
    dataset.write_text(json.dumps(texts), encoding="utf-8")
    plan = Plan(
        Workload(str(dataset), 4),
        LOADS[:1],
        repeats=1,
        timeout_s=1.0,
        warmup=4,
        vocab_size=1000,
        natural_max_tokens=8,
    )
    server = Server("a", [])
    session = Session(plan)
    await session.alternate({"a": server})
    warm_up, run = server.prompts[:4], server.prompts[4:]
    assert len(run) == 4
    assert not {*warm_up} & {*run}  # type: ignore[arg-type]


class Slow(Server):
    """A server whose answers take a while, so that rates are finite."""

    async def send(self, request: Request, timeout_s: float) -> TimedAnswer:
        answer = await super().send(request, timeout_s)
        await asyncio.sleep(0.01)
        return replace(answer, last_token_s=time.monotonic())


class Hostile(Slow):
    """After the first job it removes the folder of the report."""

    def __init__(self, folder: Path) -> None:
        super().__init__("a", [])
        self._folder = folder

    async def send(self, request: Request, timeout_s: float) -> TimedAnswer:
        if self._folder.exists():
            self._folder.rmdir()
        return await super().send(request, timeout_s)


def short_plan() -> Plan:
    return Plan(WORKLOAD, LOADS[:1], 1, timeout_s=1.0, warmup=0, vocab_size=1000)


@pytest.fixture
def target() -> Target:
    return Target("a", "http://me:secret@h/v1", None)


@pytest.mark.slow
def test_figures_are_written_though_the_report_cannot_be(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    monkeypatch.setattr(Target, "connect", lambda *_: Hostile(folder))
    output = Output(folder / "report.json", tmp_path / "sweep.svg")
    with pytest.raises(WorkloadError, match="output: cannot write"):
        bench_command([target], short_plan(), Objectives(0.3), output)
    assert (tmp_path / "sweep.svg").exists()


def test_a_report_holds_no_password(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "connect", lambda *_: Slow("a", []))
    path = tmp_path / "report.json"
    bench_command([target], short_plan(), Objectives(0.3), Output(path, None))
    text = path.read_text(encoding="utf-8")
    assert "secret" not in text
    assert json.loads(text)["settings"]["servers"][0]["url"] == "http://h/v1"
