"""The servers of one model, behind the methods of one client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.cancelling import cancel_all
from fastserve_client.errors import (
    ClientError,
    ConnectionFailed,
    ModelLost,
    ServerFailed,
    ServerOverloaded,
    ServerUnavailable,
)
from fastserve_client.results import Chunk, Completion, Tokenization

from fastserve_gateway.fleet.fleet_metrics import FleetMetrics
from fastserve_gateway.fleet.kept_answer import KeptAnswer
from fastserve_gateway.fleet.routed_request import routed_request
from fastserve_gateway.fleet.watched_server import ServerHealth, WatchedServer
from fastserve_gateway.routing.request import RoutedRequest, ServerChoice
from fastserve_gateway.routing.router import Router
from fastserve_gateway.routing.server_load import ServerLoad

if TYPE_CHECKING:
    from typing import Self, Unpack

    from fastserve_client.model_description import ModelDescription
    from fastserve_client.options import ChatTemplateOptions, Message, Prompt, RequestOptions

ResultT = TypeVar("ResultT")

# A job is sent to no more servers. It may be what kills them; and where all are full, each of them
# would have to refuse it.
_MAX_TRIES = 4
# Errors of a server that say nothing against the job.
_UNABLE = (ServerUnavailable, ServerFailed)
# Of these, what all of the server's jobs end with. A job may be what kills its servers.
_DEATHS = (ConnectionFailed, ModelLost, ServerFailed)
# While no server can go on with an answer, they are tried again after so long.
_MOVE_RETRY_S = 0.5
# In this order servers are asked what any of them can answer.
_ASK_ORDER = (ServerHealth.UP, ServerHealth.UNKNOWN, ServerHealth.SILENT, ServerHealth.DOWN)


class Fleet:
    """Has the methods of a client that the gateway needs. Belongs to one event loop.

    What a server refuses, or loses before the first token, goes to another one. If it is lost after
    the first token, another one goes on with the answer: it gets the output so far beside the
    prompt, and no text comes twice. If there is no other one, the answer waits until the same one
    is back. A server whose model does not answer gets nothing more, and its jobs fail as those of a
    dead one. A single server gets everything, and shows no pictures.

    Args:
        clients: of the model's servers, by URL. The fleet closes them.
        max_moves: how often an answer may lose its server and go on.
    """

    def __init__(
        self,
        model: str,
        clients: Mapping[str, AsyncFastServeClient],
        metrics: FleetMetrics,
        max_moves: int,
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._max_moves = max_moves
        self._only_streams = any(client.only_streams for client in clients.values())
        self._router = Router(list(clients))
        self._servers = [
            WatchedServer(
                url,
                client,
                partial(self._on_load, number),
                partial(self._on_health, number),
            )
            for number, (url, client) in enumerate(clients.items())
        ]
        # They show no state, or none yet. They get jobs only if all others are out.
        self._silent = set(range(len(clients))) if self._chooses else set()
        self._followers: list[asyncio.Task[None]] = []
        self._is_closed = False

    @property
    def _chooses(self) -> bool:
        return len(self._servers) > 1

    async def stream(
        self,
        prompt: Prompt,
        *,
        request_id: str,
        trace_context: Mapping[str, str] | None,
        on_moved: Callable[[], None] = lambda: None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Chunk]:
        """Yields the chunks of a job. Closing the generator cancels the job. Raises ClientError.

        Args:
            on_moved: called when a server goes on with the answer after a loss.
        """
        job = self._job(prompt, options)
        answer = job.answer
        while not answer.is_whole:
            with self._attempt(job, await self._find_server(job)) as attempt:
                async with attempt.server.client.stream(
                    prompt,
                    request_id=request_id,
                    trace_context=trace_context,
                    output_ids_so_far=answer.token_ids,
                    **answer.options(),
                ) as chunks:
                    async for chunk in chunks:
                        if not attempt.has_begun:
                            attempt.has_begun = True
                            self._on_first_token(attempt)
                            self._on_resumed(answer, on_moved)
                        yield answer.add(chunk)
                return

    async def generate(
        self,
        prompt: Prompt,
        *,
        request_id: str,
        trace_context: Mapping[str, str] | None,
        on_moved: Callable[[], None] = lambda: None,
        on_part: Callable[[Chunk | Completion], None] = lambda part: None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The whole completion. It has the arguments of ``stream``. Raises ClientError, and what
        ``on_part`` raises.

        Args:
            on_part: called with each part of the answer, before the next one is read.
        """
        chunks: list[Chunk] = []
        if (self._max_moves and self._chooses) or self._only_streams:
            async with aclosing(
                self.stream(
                    prompt,
                    request_id=request_id,
                    trace_context=trace_context,
                    on_moved=on_moved,
                    **options,
                )
            ) as parts:
                async for chunk in parts:
                    on_part(chunk)
                    chunks.append(chunk)
            return Completion.from_chunks(chunks)
        # A single server sends the whole answer at once, which costs far less than its tokens do.
        # After a loss it begins anew.
        job = self._job(prompt, options)
        while True:
            with self._attempt(job, await self._find_server(job)) as attempt:
                whole = await self._whole_answer(
                    attempt,
                    prompt,
                    request_id=request_id,
                    trace_context=trace_context,
                    **job.answer.options(),
                )
                self._router.on_first_token(attempt.choice)
                self._on_resumed(job.answer, on_moved)
                on_part(whole)
                return whole

    async def describe(self, *, timeout_s: float) -> ModelDescription:
        """``timeout_s`` is for each server that is asked. Raises ClientError."""
        return await self._ask(lambda client: client.describe(timeout_s=timeout_s))

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        add_special_tokens: bool | None,
        return_token_strs: bool,
        **options: Unpack[ChatTemplateOptions],
    ) -> Tokenization:
        """Raises ClientError."""
        return await self._ask(
            lambda client: client.tokenize(
                prompt,
                add_special_tokens=add_special_tokens,
                return_token_strs=return_token_strs,
                **options,
            )
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Raises ClientError."""
        return await self._ask(lambda client: client.detokenize(token_ids))

    async def is_ready(self) -> bool:
        """Whether the model of at least one server answers and takes requests."""
        answering = [server for server in self._servers if not server.silence.is_lost]
        if not self._chooses:
            return bool(answering) and await self._servers[0].client.is_ready()
        return any(server.health in (ServerHealth.UP, ServerHealth.SILENT) for server in answering)

    async def close(self) -> None:
        """Ends running jobs with an error."""
        self._is_closed = True
        await cancel_all(self._followers)
        await asyncio.gather(*(server.client.close() for server in self._servers))

    async def __aenter__(self) -> Self:
        watching = [server.silence.listen() for server in self._servers]
        if self._chooses:
            watching += [server.follow() for server in self._servers]
        self._followers = [asyncio.create_task(one) for one in watching]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _whole_answer(
        self,
        attempt: _Attempt,
        prompt: Prompt,
        *,
        request_id: str,
        trace_context: Mapping[str, str] | None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The answer in one piece. Notes in the attempt whether a single server has begun it.

        Raises ClientError.
        """
        client = attempt.server.client
        num_answers = client.num_answers
        try:
            return await client.generate(
                prompt, request_id=request_id, trace_context=trace_context, **options
            )
        except _DEATHS:
            # One that has said anything since then was not gone before. One that computes silently
            # is asked every second.
            attempt.has_begun = not self._chooses and client.num_answers > num_answers
            raise

    def _on_resumed(self, answer: KeptAnswer, on_moved: Callable[[], None]) -> None:
        """A server has begun the answer, or goes on with it."""
        if answer.loss is not None:
            self._metrics.moved.labels(self._model, answer.loss.server).inc()
            answer.on_resumed()
            on_moved()

    def _job(self, prompt: Prompt, options: RequestOptions) -> _Job:
        request = routed_request(prompt, options) if self._chooses else RoutedRequest(0)
        return _Job(request, KeptAnswer(options, self._max_moves))

    @contextmanager
    def _attempt(self, job: _Job, choice: ServerChoice) -> Iterator[_Attempt]:
        """Sends a job to one server. If that one does not take it, or is lost, notes this in the
        job.

        Raises ClientError: the job has ended.
        """
        server, metrics = self._servers[choice.server], self._metrics
        metrics.sent.labels(self._model, server.name).inc()
        if job.refusals and job.answer.loss is None:
            refused = self._servers[next(reversed(job.refusals))]
            metrics.retried.labels(self._model, refused.name).inc()
        attempt = _Attempt(server, choice, time.monotonic())
        try:
            yield attempt
        except ClientError as error:
            self._on_error(job, attempt, error)
        finally:
            self._router.on_end(choice)

    def _on_error(self, job: _Job, attempt: _Attempt, error: ClientError) -> None:
        """A server ended a job with an error. Returns if a server may take it again.

        Raises ClientError: the job ends with it.
        """
        answer, loss = job.answer, job.answer.loss
        if answer.is_whole:  # so it does not matter
            return
        # It may die before the job has a new token.
        is_lost = attempt.has_begun or (loss is not None and isinstance(error, _DEATHS))
        if isinstance(error, _UNABLE) and (answer.may_move or not is_lost):
            error = error.with_traceback(None)  # which refers to the prompt
            if is_lost:
                answer.on_lost(attempt.server.name, error, time.monotonic())
                job.refusals.clear()
            job.refusals[attempt.choice.server] = error
            return
        if loss is not None:
            self._metrics.not_moved.labels(self._model, loss.server).inc()
            raise loss.error
        if is_lost and isinstance(error, _UNABLE):
            self._metrics.not_moved.labels(self._model, attempt.server.name).inc()
        raise error

    async def _find_server(self, job: _Job) -> ServerChoice:
        """The server that gets the job next. If its answer has begun, waits for one, which may be
        the server that was lost.

        Raises ClientError: there is none.
        """
        while True:
            try:
                return self._choose(job.request, job.refusals)
            except ClientError:
                loss = job.answer.loss
                if loss is None:
                    raise
                if self._is_closed or time.monotonic() >= loss.deadline_s:
                    self._metrics.not_moved.labels(self._model, loss.server).inc()
                    raise loss.error from None
            await asyncio.sleep(_MOVE_RETRY_S)
            # Several servers are watched. A single one has to be asked whether it is back, because
            # an attempt in vain costs a move.
            if self._chooses or await self._servers[0].silence.answers():
                job.refusals.clear()

    def _choose(self, request: RoutedRequest, refusals: Mapping[int, ClientError]) -> ServerChoice:
        tried = refusals.keys()
        if len(tried) < _MAX_TRIES:
            out = tried | self._lost()
            for excluded in (out | self._silent, out):
                choice = self._router.choose(request, time.monotonic(), excluded)
                if choice is not None:
                    return choice
        if not refusals:
            raise self._no_server()
        errors = list(refusals.values())
        full = [error for error in errors if isinstance(error, ServerOverloaded)]
        # One whose queue is full may take the job sooner than one where the tenant is at its limit.
        raise min(full, key=lambda error: error.retry_after_s or 0.0) if full else errors[-1]

    async def _ask(self, ask: Callable[[AsyncFastServeClient], Awaitable[ResultT]]) -> ResultT:
        """The answer of any server to what is no job."""
        lost = self._lost()
        able = [server for number, server in enumerate(self._servers) if number not in lost]
        if not able:
            raise self._no_server()
        servers = random.sample(able, len(able))
        servers.sort(key=lambda server: _ASK_ORDER.index(server.health))
        *others, last = servers[:_MAX_TRIES]
        for server in others:
            try:
                return await ask(server.client)
            except ServerUnavailable:
                continue
        return await ask(last.client)

    def _on_first_token(self, attempt: _Attempt) -> None:
        now_s, choice = time.monotonic(), attempt.choice
        self._router.on_first_token(choice)
        labels = self._model, attempt.server.name
        self._metrics.first_token_s.labels(*labels).observe(now_s - attempt.sent_s)
        if self._chooses:
            self._metrics.expected_s.labels(*labels).observe(choice.delay_s)

    def _lost(self) -> set[int]:
        """Servers that get nothing until their model answers again."""
        return {number for number, one in enumerate(self._servers) if one.silence.is_lost}

    def _no_server(self) -> ServerUnavailable:
        return ServerUnavailable(f"no server of model {self._model} takes requests")

    def _on_load(self, number: int, load: ServerLoad) -> None:
        self._router.on_load(number, load, time.monotonic())

    def _on_health(self, number: int) -> None:
        server = self._servers[number]
        is_up = server.health is ServerHealth.UP
        self._metrics.up.labels(self._model, server.name).set(is_up)
        self._silent.discard(number)
        if server.health is ServerHealth.SILENT:
            self._silent.add(number)
        elif is_up:
            self._router.on_up(number)
        elif server.health is ServerHealth.DOWN:
            self._router.on_down(number)


@dataclass(slots=True)
class _Job:
    """What is known of a job while servers are tried."""

    request: RoutedRequest
    answer: KeptAnswer
    refusals: dict[int, ClientError] = field(default_factory=dict)
    """Errors of servers that are not tried now."""


@dataclass(slots=True)
class _Attempt:
    """One job at one server."""

    server: WatchedServer
    choice: ServerChoice
    sent_s: float
    has_begun: bool = False
    """Whether its client has got a token, or the only server was lost while it computed."""
