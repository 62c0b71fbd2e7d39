"""Sends the jobs of a trace to a server and records the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from fastserve_client.cancelling import cancel_all
from fastserve_client.errors import ClientError

from fastserve_bench.connection import Connection, Request, TimedAnswer
from fastserve_bench.outcome import Failure, FailureKind, LoadOutcome
from fastserve_bench.report.records import JobRecord


class Driver:
    """One run against one server. ``outcome`` is whole once the run has returned or was cancelled.

    Cancelling the run cancels its requests, at the server too.

    Args:
        timeout_s: For each request.
        on_change: Called whenever a job was sent or has ended.
    """

    def __init__(
        self,
        connection: Connection,
        requests: Sequence[Request],
        timeout_s: float,
        on_change: Callable[[Driver], None],
    ) -> None:
        self.num_sent = 0
        self.num_output_tokens = 0
        self.outcome = LoadOutcome()
        self._connection = connection
        self._requests = requests
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._started_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started_s

    async def open_loop(self, arrivals_s: Sequence[float]) -> None:
        """Sends each job at its arrival, even if earlier jobs have not finished.

        Latencies count from the arrival, not from the sending. Otherwise a client that lags would
        flatter the server.

        Args:
            arrivals_s: Ascending, one for each request. The run begins at 0.
        """
        await self._run(self._send_at(arrivals_s))

    async def closed_loop(self, concurrency: int) -> None:
        """Keeps ``concurrency`` requests running: when one ends, the next is sent."""
        waiting = iter(self._requests)
        await self._run(_all([self._send_in_turn(waiting) for _ in range(concurrency)]))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        outcome = self.outcome
        cpu_started_s, self._started_s = time.process_time(), time.monotonic()
        try:
            await work
        except asyncio.CancelledError:
            outcome.interrupted = True
            raise
        finally:
            outcome.cpu_share = (time.process_time() - cpu_started_s) / self.elapsed_s

    async def _send_at(self, arrivals_s: Sequence[float]) -> None:
        tasks = []
        try:
            for request, arrival_s in zip(self._requests, arrivals_s, strict=True):
                await asyncio.sleep(max(0.0, arrival_s - self.elapsed_s))
                tasks.append(asyncio.ensure_future(self._send(request, arrival_s)))
        except asyncio.CancelledError:
            await cancel_all(tasks)
            raise
        await _all(tasks)

    async def _send_in_turn(self, waiting: Iterator[Request]) -> None:
        for request in waiting:
            await self._send(request, self.elapsed_s)

    async def _send(self, request: Request, arrival_s: float) -> None:
        sent_s = self.elapsed_s
        self.num_sent += 1
        self._on_change(self)
        self.outcome.send_lateness_s.append(max(0.0, sent_s - arrival_s))
        try:
            answer = await self._connection.send(request, self._timeout_s)
        except ClientError as error:
            self._fail(request, arrival_s, FailureKind.of(error), str(error))
        except asyncio.CancelledError:
            self._fail(request, arrival_s, FailureKind.CANCELLED, "the run was interrupted")
            raise
        else:
            if request.exact and answer.output_tokens != request.max_tokens:
                message = f"{answer.output_tokens} tokens came instead of {request.max_tokens}"
                self._fail(request, arrival_s, FailureKind.WRONG_LENGTH, message)
            else:
                self.outcome.records.append(self._record(request, answer, arrival_s, sent_s))
                self.num_output_tokens += answer.output_tokens
        self._on_change(self)

    def _fail(self, request: Request, arrival_s: float, kind: FailureKind, message: str) -> None:
        self.outcome.failures.append(Failure(arrival_s, kind, message, request.service))
        self.outcome.last_failure_s = self.elapsed_s

    def _record(
        self, request: Request, answer: TimedAnswer, arrival_s: float, sent_s: float
    ) -> JobRecord:
        first_token_s = answer.first_token_s - self._started_s
        first_scheduled_s = None
        if answer.queued_s is not None:
            # The server's waiting time on the client's clock, without the request's way there.
            first_scheduled_s = min(max(arrival_s, sent_s + answer.queued_s), first_token_s)
        return JobRecord(
            arrival_s=arrival_s,
            first_scheduled_s=first_scheduled_s,
            first_token_s=first_token_s,
            last_token_s=answer.last_token_s - self._started_s,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            num_preemptions=answer.num_preemptions,
            service=request.service,
        )


async def _all(work: Sequence[Any]) -> None:
    """Runs all to their ends. A failure, or a cancellation, first cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await cancel_all(tasks)
        raise
