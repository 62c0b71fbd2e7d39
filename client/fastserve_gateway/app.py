"""The gateway's routes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.errors import ClientError, InvalidRequest
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from fastserve_gateway.answer import Answer
from fastserve_gateway.auth import ApiKeys, Caller
from fastserve_gateway.body import check_fields, ignored_fields, read_body
from fastserve_gateway.chat import ChatAnswer
from fastserve_gateway.completions import CompletionAnswer
from fastserve_gateway.disconnect import while_connected
from fastserve_gateway.errors import (
    MESSAGES_PATH,
    ApiError,
    from_client_error,
    no_such_model,
    no_such_route,
)
from fastserve_gateway.event_stream import EventStream
from fastserve_gateway.held_bodies import HeldBodies, Take
from fastserve_gateway.jobs import complete_all, stream_all
from fastserve_gateway.live import live_routes
from fastserve_gateway.live_feed import LiveFeed
from fastserve_gateway.messages_answer import MessagesAnswer
from fastserve_gateway.messages_schema import ConversationRequest, MessagesRequest
from fastserve_gateway.metrics import RequestMetrics, note_tenant
from fastserve_gateway.model_formats import DescribedFormats, FormatNames
from fastserve_gateway.response_chain import ResponseChains
from fastserve_gateway.response_store import ResponseStore
from fastserve_gateway.responses_answer import ResponsesAnswer
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import ChatRequest, CompletionRequest, RequestBody
from fastserve_gateway.service import service_options
from fastserve_gateway.tokenization import (
    DetokenizeRequest,
    TaskBody,
    TokenizeRequest,
    detokenize_result,
    tokenize_chat,
    tokenize_result,
)

RequestT = TypeVar("RequestT", bound=RequestBody)
TaskT = TypeVar("TaskT", bound=TaskBody | ConversationRequest)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    url: str
    """Endpoint of the tritonserver, gRPC or HTTP."""
    model: str
    """The model's name there and in the API."""
    keys: ApiKeys
    strict: bool
    """True: unknown fields are errors."""
    max_body_bytes: int
    max_held_bytes: int
    """The bytes of the bodies of all unanswered requests."""
    max_jobs: int
    """Most answers to one request: prompts times ``n``."""
    max_stored_bytes: int
    """The bytes of all stored responses; 0 stores none."""
    formats: FormatNames = FormatNames()  # noqa: RUF009

    def __post_init__(self) -> None:
        if self.max_held_bytes < self.max_body_bytes:
            raise InvalidRequest(
                f"max_held_bytes: got {self.max_held_bytes}; must be at least the "
                f"{self.max_body_bytes} of max_body_bytes, or the largest would never be taken"
            )


def create_app(settings: GatewaySettings) -> FastAPI:
    """The ASGI application. Its client lives as long as its lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncFastServeClient(settings.url, model=settings.model) as client:
            app.state.client = client
            app.state.formats = DescribedFormats(client, settings.formats)
            app.state.live_feed = LiveFeed(client)
            yield

    async def require_key(request: Request) -> Caller:
        headers = request.headers
        return settings.keys.check(
            headers.get("authorization"), headers.get("x-api-key"), headers.get("host", "")
        )

    async def respond(
        request: Request,
        caller: Caller,
        take: Take,
        schema: type[RequestT],
        answer_to: Callable[[RequestT], Awaitable[Answer]],
    ) -> Response:
        client: AsyncFastServeClient = app.state.client
        note_tenant(request, caller.tenant)  # now, because the body may be refused
        body = await read_body(request, schema, settings.max_body_bytes, take)
        check_fields(body, settings.model, settings.max_jobs)
        if caller.tenant is None:
            note_tenant(request, body.tenant or "")
        service = service_options(body, request.headers, caller)
        try:
            answer = await answer_to(body)
        except ClientError as error:  # the server does not describe its model
            raise from_client_error(error, {}) from None
        unknown = [*body.unknown_fields(), *answer.unused_fields()]
        headers = ignored_fields(unknown, strict=settings.strict)
        jobs = answer.jobs(service)
        try:
            if not answer.streams:
                work = complete_all(client, jobs)
                whole = answer.whole(await while_connected(request.receive, work))
                return JSONResponse(whole, headers=headers)
            # Only the first event decides the status.
            events = answer.events(stream_all(client, jobs))
            first = await while_connected(request.receive, anext(events))
            return EventStream(
                first,
                events,
                headers,
                lambda error: answer.failure(from_client_error(error, answer.field_names())),
            )
        except ClientError as error:
            raise from_client_error(error, answer.field_names()) from None

    async def do_task(
        request: Request,
        take: Take,
        schema: type[TaskT],
        result_of: Callable[[TaskT], Coroutine[Any, Any, Mapping[str, Any]]],
    ) -> Response:
        body = await read_body(request, schema, settings.max_body_bytes, take)
        if body.model not in (None, settings.model):
            raise no_such_model(settings.model)
        headers = ignored_fields(body.unknown_fields(), strict=settings.strict)
        try:
            result = await while_connected(request.receive, result_of(body))
        except ClientError as error:
            raise from_client_error(error, body.field_names()) from None
        return JSONResponse(result, headers=headers)

    # No pages that describe the API to a browser: they load scripts from elsewhere. No redirects:
    # behind a proxy with TLS they would lead to plain HTTP.
    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    registry = CollectorRegistry()
    app.add_middleware(RequestMetrics, registry=registry)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    with_caller = Depends(require_key)
    with_key = [with_caller]
    with_body = Depends(HeldBodies(settings.max_held_bytes).of_request)
    started = int(time.time())

    @app.post("/v1/completions", dependencies=with_key)
    async def completions(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(body: CompletionRequest) -> CompletionAnswer:
            return CompletionAnswer(body)

        return await respond(request, caller, take, CompletionRequest, answer_to)

    @app.post("/v1/chat/completions", dependencies=with_key)
    async def chat_completions(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(body: ChatRequest) -> ChatAnswer:
            return ChatAnswer(body, await app.state.formats.current())

        return await respond(request, caller, take, ChatRequest, answer_to)

    store = ResponseStore(settings.max_stored_bytes)

    @app.post("/v1/responses", dependencies=with_key)
    async def responses(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(body: ResponsesRequest) -> ResponsesAnswer:
            chains = ResponseChains(store, caller.tenant)
            return await chains.answer(body, app.state.formats, take)

        return await respond(request, caller, take, ResponsesRequest, answer_to)

    @app.get("/v1/responses/{response_id}", dependencies=with_key)
    async def stored_response(response_id: str, caller: Caller = with_caller) -> Response:
        return JSONResponse(ResponseChains(store, caller.tenant).find(response_id).response)

    @app.delete("/v1/responses/{response_id}", dependencies=with_key)
    async def delete_response(response_id: str, caller: Caller = with_caller) -> Response:
        ResponseChains(store, caller.tenant).delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.post(MESSAGES_PATH, dependencies=with_key)
    async def messages(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(body: MessagesRequest) -> MessagesAnswer:
            return MessagesAnswer(body, await app.state.formats.current())

        return await respond(request, caller, take, MessagesRequest, answer_to)

    @app.post(f"{MESSAGES_PATH}/count_tokens", dependencies=with_key)
    async def count_tokens(request: Request, take: Take = with_body) -> Response:
        async def result_of(body: ConversationRequest) -> dict[str, Any]:
            formats = await app.state.formats.current()
            tokens = await tokenize_chat(app.state.client, formats, body.chat)
            return {"input_tokens": tokens.count}

        return await do_task(request, take, ConversationRequest, result_of)

    @app.post("/tokenize", dependencies=with_key)
    async def tokenize(request: Request, take: Take = with_body) -> Response:
        async def result_of(body: TokenizeRequest) -> dict[str, Any]:
            return await tokenize_result(app.state.client, app.state.formats, body)

        return await do_task(request, take, TokenizeRequest, result_of)

    @app.post("/detokenize", dependencies=with_key)
    async def detokenize(request: Request, take: Take = with_body) -> Response:
        async def result_of(body: DetokenizeRequest) -> dict[str, Any]:
            return await detokenize_result(app.state.client, body)

        return await do_task(request, take, DetokenizeRequest, result_of)

    model = {"id": settings.model, "object": "model", "created": started, "owned_by": "fastserve"}

    @app.get("/v1/models", dependencies=with_key)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}", dependencies=with_key)
    async def one_model(name: str) -> Response:
        if name != settings.model:
            raise no_such_model(settings.model)
        return JSONResponse(model)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if not await app.state.client.is_ready():
            raise ApiError(503, "the model server is not ready")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", dependencies=with_key)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.include_router(
        live_routes(lambda: app.state.live_feed, lambda: app.state.formats, require_key)
    )
    return app


def end_live_view(app: FastAPI) -> None:
    """Ends events that never end by themselves, when the server takes no new requests."""
    app.state.live_feed.close()


async def end_answers(app: FastAPI) -> None:
    """Ends unfinished answers with an error, and cancels their jobs."""
    await app.state.client.close()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return no_such_route().response(request.url.path)
    wrong_method = error.status_code == 405
    message = "the route does not take this method" if wrong_method else error.detail
    answer = ApiError(error.status_code, message, headers=error.headers)
    return answer.response(request.url.path)
