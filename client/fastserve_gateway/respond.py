"""From a request's body to its response: the way that all routes with a body share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastserve_client.errors import ClientError
from fastserve_client.results import Chunk, Completion
from starlette.responses import Response

from fastserve_gateway.answer import Answer
from fastserve_gateway.answer_size import (
    AnswerLimit,
    chunk_bytes,
    completion_bytes,
    counted,
)
from fastserve_gateway.answer_writer import AnswerWriter
from fastserve_gateway.auth import Caller
from fastserve_gateway.body import check_number_of_jobs, ignored_fields, read_body
from fastserve_gateway.body_threads import BodyThreads, RunWork
from fastserve_gateway.disconnect import while_connected
from fastserve_gateway.errors import ApiError, from_client_error
from fastserve_gateway.event_stream import EventStream
from fastserve_gateway.held_bodies import Take
from fastserve_gateway.jobs import complete_all, stream_all
from fastserve_gateway.messages_schema import ConversationRequest
from fastserve_gateway.metrics import note_tenant
from fastserve_gateway.pings import with_pings
from fastserve_gateway.request_traces import note_model
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import RequestBody
from fastserve_gateway.served_models import ServedModel, find_model
from fastserve_gateway.service import service_options
from fastserve_gateway.settings import GatewaySettings
from fastserve_gateway.tokenization import TaskBody
from fastserve_gateway.whole_response import WholeResponse

RequestT = TypeVar("RequestT", bound=RequestBody)
TaskT = TypeVar("TaskT", bound=TaskBody | ConversationRequest | ResponsesRequest)


@dataclass(frozen=True, slots=True)
class Responder:
    """Both methods raise ApiError, and ClientDisconnect if the client goes away."""

    settings: GatewaySettings
    models: Mapping[str, ServedModel]
    threads: BodyThreads
    writer: AnswerWriter

    async def respond(
        self,
        request: Request,
        caller: Caller,
        take: Take,
        schema: type[RequestT],
        answer_to: Callable[[RequestT, ServedModel, RunWork], Awaitable[Answer]],
    ) -> Response:
        """The response to a request for tokens: JSON, or a stream of events.

        Args:
            take: takes room for the body and the answer.
            answer_to: makes the answer to a body. It may run work on it, and may raise ClientError.
        """
        settings = self.settings
        note_tenant(request, caller.tenant)  # now, because the body may be refused
        body, run = await read_body(request, schema, settings.max_body_bytes, take, self.threads)
        model = find_model(self.models, body.model, settings.aliases)
        check_number_of_jobs(body, settings.max_jobs)
        note_model(body.model)
        if caller.tenant is None:
            note_tenant(request, body.tenant or "")
        service = service_options(body, request.headers, caller, share_kv=settings.share_kv)
        try:
            answer = await answer_to(body, model, run)
        except ClientError as error:  # the server does not describe its model
            raise from_client_error(error, {}) from None
        unknown = [*(await run(body.unknown_fields)), *answer.unused_fields()]
        headers = ignored_fields(unknown, strict=settings.strict)
        names = answer.field_names()
        limit = AnswerLimit(settings.max_answer_bytes, body.num_choices, names, answer.is_held)
        try:
            wanted = await run(partial(answer.jobs, service))
            bounded = limit.bounded(model.fleet, wanted, take)
            jobs = await while_connected(request.receive, bounded)
            if not answer.streams:
                work = complete_all(model.fleet, jobs, lambda part: take(chunk_bytes(part)))
                completions = await while_connected(request.receive, work)
                return await self._written(answer, completions, headers)
            # What comes first decides the status.
            chunks = stream_all(model.fleet, jobs)
            events = _events(answer, counted(chunks, take) if answer.is_held else chunks)
            first = await while_connected(request.receive, anext(events))
            return EventStream(
                first,
                events,
                headers,
                lambda error: answer.failure(from_client_error(error, names)),
            )
        except ClientError as error:
            raise from_client_error(error, names) from None

    async def _written(
        self, answer: Answer, completions: Sequence[Completion], headers: Mapping[str, str]
    ) -> Response:
        size = sum(map(completion_bytes, completions))
        if answer.is_stored:
            whole = answer.whole(completions)  # here, for the store belongs to the event loop
            return await self.writer.run(size, lambda: WholeResponse(whole, headers=headers))
        return await self.writer.run(
            size, lambda: WholeResponse(answer.whole(completions), headers=headers)
        )

    async def do_task(
        self,
        request: Request,
        caller: Caller,
        take: Take,
        schema: type[TaskT],
        result_of: Callable[[TaskT, ServedModel, RunWork], Coroutine[Any, Any, Mapping[str, Any]]],
    ) -> Response:
        """The response to a request that starts no job."""
        max_bytes = self.settings.max_body_bytes
        body, run = await read_body(request, schema, max_bytes, take, self.threads)
        model = find_model(self.models, body.model, self.settings.aliases)
        unknown = await run(body.unknown_fields)
        headers = ignored_fields(unknown, strict=self.settings.strict)

        async def work() -> Mapping[str, Any]:
            async with model.turns.turn(caller.tenant):
                return await result_of(body, model, run)

        try:
            result = await while_connected(request.receive, work())
        except ClientError as error:
            raise from_client_error(error, body.field_names()) from None
        return WholeResponse(result, headers=headers)


async def _events(
    answer: Answer, chunks: AsyncGenerator[tuple[int, Chunk], None]
) -> AsyncGenerator[bytes, None]:
    """The events of the answer, with pings until they come. After the first of both, no room for
    more of the answer (ApiError) is the last event."""
    has_begun = False
    async with aclosing(with_pings(answer.events(chunks), answer.ping)) as events:
        try:
            async for one in events:
                has_begun = True
                yield one
        except ApiError as error:
            if not has_begun:
                raise
            yield answer.failure(error)
