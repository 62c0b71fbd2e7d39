"""A load test: which server gets which load, and in which order."""

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
from fastserve_bench.outcome import LoadOutcome
from fastserve_bench.report.summary import Summary, summarize
from fastserve_bench.requests import exact_requests, natural_requests
from fastserve_bench.workload import TraceJob, Workload, mean_rate

# Enough to load what a server loads lazily, and short on any machine.
_WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a sweep: open loop at a rate, or closed loop with a number of clients."""

    rate: float | None = None
    """Jobs per second. ``None`` without a concurrency means the data set's own timestamps."""
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
    """The loads that every server gets."""

    workload: Workload
    """Its seed is for the first repeat. The others take the next seeds."""
    loads: Sequence[Load]
    repeats: int
    timeout_s: float
    """For each request."""
    warmup: int
    """Requests that do not count: before the first run, or, if servers take turns, before each."""
    vocab_size: int
    pause_s: float = 0.0
    """Seconds before each run on one of several servers. The last one may still be busy."""
    natural_max_tokens: int | None = None
    """If set, send the data set's texts. Answers end by themselves or at this length."""
    chat: bool = False
    """True: send those texts as messages of users."""

    def trace(self, load: Load, repeat: int) -> list[TraceJob]:
        """The jobs of a run, the same for every server.

        Raises:
            WorkloadError: the workload cannot be used.
        """
        workload = replace(self.workload, seed=self.workload.seed + repeat)
        # A closed loop takes the same jobs in the same order and ignores their arrivals.
        return _trace(workload, 1.0 if load.is_closed else load.rate)

    def requests(self, trace: Sequence[TraceJob], load: Load, repeat: int) -> list[Request]:
        """The requests of a run. Raises WorkloadError: too few tokens, or no texts."""
        if self.natural_max_tokens is not None:
            return natural_requests(trace, self.natural_max_tokens, self.chat)
        # Each run has other prompts, so a server that keeps prefixes has seen none of them.
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
    """A finished run of one load on one server."""

    label: str
    load: Load
    repeat: int
    outcome: LoadOutcome

    @cached_property
    def summary(self) -> Summary | None:
        """``None``: no job finished."""
        outcome = self.outcome
        return summarize(outcome.records, outcome.duration_s) if outcome.records else None


Start: TypeAlias = Callable[[], AbstractAsyncContextManager[Connection]]
"""Starts a server. It runs as long as the context."""


class Session:
    """Runs the plan. ``runs`` holds the runs so far, also after a cancellation.

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
        """Measures running servers, by label. Each load goes to all of them before the next load.

        So other work of the machine affects all alike. Before each run on one of several servers
        there is a pause, in which the last server comes to rest, and a warm-up.

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
        """Measures servers one at a time. Each gets all loads, then the next one starts.

        All of them start once for each repeat, so that other work of the machine affects all
        alike.

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
        """Sends requests that do not count.

        Raises ClientError: the server is not there, or cannot serve the workload.
        """
        await connection.check()
        load = self.plan.loads[0]
        # The seed is that of a run that never comes, so the prompts are others.
        trace = self.plan.trace(load, self.plan.repeats)
        requests = self.plan.requests(trace, load, self.plan.repeats)[: self.plan.warmup]
        short = [
            replace(request, max_tokens=min(request.max_tokens, _WARMUP_TOKENS))
            for request in requests
        ]
        sent = [connection.send(request, self.plan.timeout_s) for request in short]
        for result in await asyncio.gather(*sent, return_exceptions=True):
            # A queue that is full now is full in the runs too, and counted there.
            if isinstance(result, ServerOverloaded):
                continue
            if isinstance(result, ClientError):
                raise type(result)(f"{label}: the warm-up failed: {result}")
            if isinstance(result, BaseException):
                raise result

    async def run(self, label: str, connection: Connection, load: Load, repeat: int) -> None:
        """Runs one load on one server, once."""
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
