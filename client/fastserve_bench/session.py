"""A load test: which server gets which load, in what order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeAlias

from fastserve_client.errors import ClientError, ServerOverloaded

from fastserve_bench.connection import Connection, Request
from fastserve_bench.driver import Driver
from fastserve_bench.outcome import Outcome
from fastserve_bench.report.summary import Summary, summarize
from fastserve_bench.requests import exact_requests, natural_requests
from fastserve_bench.workload import TraceJob, Workload, mean_rate

# Enough to load what a server loads with its first jobs, and short on any machine.
_WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a sweep: open loop at a rate, or closed loop with a number of clients."""

    rate: float | None = None
    """Jobs per second; ``None`` without a concurrency: the data set's own timestamps."""
    concurrency: int | None = None

    @property
    def is_closed(self) -> bool:
        return self.concurrency is not None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "own timestamps" if self.rate is None else f"{self.rate:g} jobs/s"


@dataclass(frozen=True, slots=True)
class Plan:
    """What every server goes through."""

    workload: Workload
    """Its seed is that of the first repeat; the others take the next ones."""
    loads: Sequence[Load]
    repeats: int
    timeout_s: float
    """Of each request."""
    warmup: int
    """Requests that do not count: before the first run, or where servers take turns before each."""
    vocab_size: int
    pause_s: float = 0.0
    """Before each run on one of several servers: the one before may be busy for a while longer."""
    natural_max_tokens: int | None = None
    """Send the data set's texts, and let answers end by themselves or here."""
    chat: bool = False
    """Send those as messages of users."""

    def trace(self, load: Load, repeat: int) -> list[TraceJob]:
        """The jobs of a run, the same for every server.

        Raises:
            WorkloadError: the workload cannot be used.
        """
        workload = replace(self.workload, seed=self.workload.seed + repeat)
        # A closed loop takes the same jobs in the same order; when they would arrive is nothing.
        return _trace(workload, 1.0 if load.is_closed else load.rate)

    def requests(self, trace: Sequence[TraceJob], load: Load, repeat: int) -> list[Request]:
        """Raises WorkloadError: the vocabulary is too small, or the data set has no texts."""
        if self.natural_max_tokens is not None:
            return natural_requests(trace, self.natural_max_tokens, self.chat)
        # Other prompts in each run: a server that keeps prefixes has seen none of them.
        seed = (self.workload.seed, repeat, self.loads.index(load))
        return exact_requests(trace, self.vocab_size, seed)

    def offered(self, load: Load) -> float:
        """Jobs per second, or the number of clients of a closed loop."""
        if load.concurrency is not None:
            return load.concurrency
        return mean_rate(self.trace(load, 0)) if load.rate is None else load.rate


@cache
def _trace(workload: Workload, rate: float | None) -> list[TraceJob]:
    return workload.trace(rate)


@dataclass(frozen=True)
class Run:
    """One load on one server, once, after its end."""

    label: str
    load: Load
    repeat: int
    outcome: Outcome

    @cached_property
    def summary(self) -> Summary | None:
        """``None``: no job finished."""
        outcome = self.outcome
        return summarize(outcome.records, outcome.duration_s) if outcome.records else None


Start: TypeAlias = Callable[[], AbstractAsyncContextManager[Connection]]
"""Starts a server, which runs as long as the context."""


class Session:
    """Runs the plan; ``runs`` holds what there is, also after it was cancelled.

    Args:
        on_start: Called before each run with label, load and number of jobs.
        on_change: Called whenever a job of the run was sent or has ended.
    """

    def __init__(
        self,
        plan: Plan,
        on_start: Callable[[str, Load, int], None] = lambda *_: None,
        on_change: Callable[[Driver], None] = lambda _: None,
    ) -> None:
        self.plan = plan
        self.runs: list[Run] = []
        self._on_start = on_start
        self._on_change = on_change

    async def alternate(self, connections: Mapping[str, Connection]) -> None:
        """Servers that run already, by label: each load goes to all of them before the next one.

        So what the machine does besides meets all alike. Before each run on one of several there is
        a pause, in which the server before it comes to rest, and a warm-up.

        Raises:
            ClientError: a server is not there, or fails the warm-up.
        """
        take_turns = len(connections) > 1
        for label, connection in connections.items():
            await self.warm_up(label, connection)
        for repeat in range(self.plan.repeats):
            for load in self.plan.loads:
                for label, connection in connections.items():
                    if take_turns:
                        await asyncio.sleep(self.plan.pause_s)
                        await self.warm_up(label, connection)
                    await self.run(label, connection, load, repeat)

    async def in_turn(self, servers: Mapping[str, Start]) -> None:
        """Servers of which one can run at a time: each gets all loads, then the next one starts.

        All of them once for each repeat, so that what the machine does besides meets all alike.

        Raises:
            ClientError: a server does not start, or fails the warm-up.
        """
        for repeat in range(self.plan.repeats):
            for label, start in servers.items():
                async with start() as connection:
                    await self.warm_up(label, connection)
                    for load in self.plan.loads:
                        await self.run(label, connection, load, repeat)

    async def warm_up(self, label: str, connection: Connection) -> None:
        """Raises ClientError: the server is not there, or cannot serve the workload."""
        await connection.check()
        load = self.plan.loads[0]
        # Seeded like a run that never comes, so that its prompts are others.
        trace = self.plan.trace(load, self.plan.repeats)
        requests = self.plan.requests(trace, load, self.plan.repeats)[: self.plan.warmup]
        short = [
            replace(request, max_tokens=min(request.max_tokens, _WARMUP_TOKENS))
            for request in requests
        ]
        sent = [connection.send(request, self.plan.timeout_s) for request in short]
        for result in await asyncio.gather(*sent, return_exceptions=True):
            # A queue that is full while warming up is full in the runs too, and counted there.
            if isinstance(result, ServerOverloaded):
                continue
            if isinstance(result, ClientError):
                raise type(result)(f"{label}: the warm-up failed: {result}")
            if isinstance(result, BaseException):
                raise result

    async def run(self, label: str, connection: Connection, load: Load, repeat: int) -> None:
        """One load on one server, once."""
        trace = self.plan.trace(load, repeat)
        requests = self.plan.requests(trace, load, repeat)
        self._on_start(label, load, len(requests))
        driver = Driver(connection, requests, self.plan.timeout_s, self._on_change)
        try:
            if load.concurrency is None:
                await driver.open_loop([job.arrival_s for job in trace])
            else:
                await driver.closed_loop(load.concurrency)
        finally:
            self.runs.append(Run(label, load, repeat, driver.outcome))
