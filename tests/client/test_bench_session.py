"""In what order servers get their loads, and what lies between."""

from __future__ import annotations

import asyncio
import time

from fastserve_client.bench.connection import Answer, Request
from fastserve_client.bench.session import Load, Observer, Plan, Session
from fastserve_client.workload import LengthLimits, Workload

PAUSE_S = 0.2
DEADLINE_S = 20.0
WORKLOAD = Workload("equal:8:4", 2, 0, LengthLimits())
LOADS = (Load(concurrency=1), Load(concurrency=2))
REPEATS, WARMUP = 2, 1
NUM_LOADS = len(LOADS) * REPEATS


class Server:
    """Answers at once, and writes down when it was asked."""

    def __init__(self, label: str, asked: list[tuple[str, float]]) -> None:
        self._label, self._asked = label, asked

    async def check(self) -> None:
        pass

    async def send(self, request: Request, timeout_s: float) -> Answer:
        now_s = time.monotonic()
        self._asked.append((self._label, now_s))
        return Answer(now_s, now_s, len(request.prompt), request.max_tokens)

    async def close(self) -> None:
        pass


async def asked(*labels: str, pause_s: float) -> list[tuple[str, float]]:
    """Who was asked when."""
    times: list[tuple[str, float]] = []
    plan = Plan(
        WORKLOAD,
        LOADS,
        REPEATS,
        timeout_s=1.0,
        warmup=WARMUP,
        vocab_size=1000,
        pause_s=pause_s,
    )
    session = Session(plan, Observer(lambda *_: None, lambda _: None))
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
