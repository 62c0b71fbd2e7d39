"""The gateway's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.endpoint import Endpoint
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from fastserve_gateway.answer_size import TOKEN_BYTES, VALUE_BYTES
from fastserve_gateway.answer_writer import AnswerWriter
from fastserve_gateway.auth import Caller
from fastserve_gateway.body_threads import BodyThreads, RunWork
from fastserve_gateway.browsers import allow_origins
from fastserve_gateway.chat import ChatAnswer
from fastserve_gateway.compaction_answer import CompactionAnswer, compaction_chat
from fastserve_gateway.completions import CompletionAnswer
from fastserve_gateway.connections import Connections, max_connections
from fastserve_gateway.errors import (
    MESSAGES_PATH,
    ApiError,
    invalid,
    no_such_route,
)
from fastserve_gateway.fleet.fleet import Fleet
from fastserve_gateway.fleet.fleet_metrics import FleetMetrics
from fastserve_gateway.held_bodies import HeldBodies, Take
from fastserve_gateway.http_connection import HttpConnection
from fastserve_gateway.live import live_routes
from fastserve_gateway.live_feed import LiveFeed
from fastserve_gateway.messages_answer import MessagesAnswer
from fastserve_gateway.messages_schema import ConversationRequest, MessagesRequest
from fastserve_gateway.metrics import RequestMetrics
from fastserve_gateway.model_formats import DescribedFormats
from fastserve_gateway.request_ids import RequestIds
from fastserve_gateway.request_traces import RequestTraces
from fastserve_gateway.respond import Responder
from fastserve_gateway.response_chain import ResponseChains
from fastserve_gateway.response_store import ResponseStore
from fastserve_gateway.responses_answer import ResponsesAnswer
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import ChatRequest, CompletionRequest
from fastserve_gateway.served_models import ANY_NAME, ServedModel, find_model, shown_model
from fastserve_gateway.settings import GatewaySettings
from fastserve_gateway.share_metrics import ShareMetrics
from fastserve_gateway.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize_result,
    tokenize_chat,
    tokenize_result,
)
from fastserve_gateway.turns import Turns
from fastserve_gateway.whole_response import WholeResponse

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig
    from fastserve_client.tracer import Tracer

# Of FastAPI's own, whose logs have the messages of exceptions. These can quote a request.
_NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}


def create_app(settings: GatewaySettings, tracer: Tracer | None = None) -> FastAPI:
    """The ASGI application. Its clients live as long as its lifespan.

    Args:
        tracer: for spans of requests; None: there are none.
    """
    registry = CollectorRegistry()
    fleet_metrics, share_metrics = FleetMetrics(registry), ShareMetrics(registry)
    are_shared = settings.keys.are_of_tenants
    connections = Connections(
        max_connections(),
        are_shared=are_shared,
        on_refusal=share_metrics.on_refusal("connections"),
        weights=settings.keys.weights,
    )

    async def serve_model(name: str, stack: AsyncExitStack) -> ServedModel:
        clients = {
            str(Endpoint.parse(url)): AsyncFastServeClient(url, model=name) for url in settings.urls
        }
        fleet = await stack.enter_async_context(
            Fleet(name, clients, fleet_metrics, settings.max_moves)
        )
        feeds = [LiveFeed(client) for client in clients.values()]
        turns = Turns(share_metrics.on_refusal("turns"))
        return ServedModel(fleet, DescribedFormats(fleet, settings.formats), feeds, turns)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            models = {name: await serve_model(name, stack) for name in settings.models}
            threads, writer = BodyThreads(), AnswerWriter()
            stack.callback(threads.close)
            stack.callback(writer.close)
            app.state.responder = Responder(settings, models, threads, writer)
            yield {"connections": connections}

    def responder() -> Responder:
        found: Responder = app.state.responder
        return found

    async def require_key(request: Request) -> Caller:
        headers = request.headers
        caller = settings.keys.check(
            headers.get("authorization"), headers.get("x-api-key"), headers.get("host", "")
        )
        connection = getattr(request.state, "connection", None)
        if isinstance(connection, HttpConnection):
            connection.on_caller(caller.tenant)
        return caller

    # No pages that describe the API to a browser: they load scripts from elsewhere. No redirects:
    # behind a proxy with TLS they would lead to plain HTTP.
    app = FastAPI(
        lifespan=lifespan, openapi_url=None, redirect_slashes=False, telemetry=_NO_TELEMETRY
    )
    app.add_middleware(RequestMetrics, registry=registry)
    app.add_middleware(RequestIds)
    if tracer is not None:
        app.add_middleware(RequestTraces, tracer=tracer)
    allow_origins(app, settings.cors_origins)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    with_viewer = Depends(require_key)

    async def require_client(caller: Caller = with_viewer) -> Caller:
        caller.check_is_client()
        return caller

    with_caller = Depends(require_client)
    with_key = [with_caller]
    held = HeldBodies(
        settings.max_held_bytes,
        are_shared=are_shared,
        on_refusal=share_metrics.on_refusal("held_bytes"),
        weights=settings.keys.weights,
    )

    async def hold(caller: Caller = with_caller) -> AsyncGenerator[Take]:
        """Frees the request's bytes when its answer has been sent."""
        with held.of_request(caller.tenant) as take:
            yield take

    with_body = Depends(hold)
    started = int(time.time())

    @app.post("/v1/completions", dependencies=with_key)
    async def completions(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(
            body: CompletionRequest, model: ServedModel, run: RunWork
        ) -> CompletionAnswer:
            return CompletionAnswer(body)

        return await responder().respond(request, caller, take, CompletionRequest, answer_to)

    @app.post("/v1/chat/completions", dependencies=with_key)
    async def chat_completions(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(body: ChatRequest, model: ServedModel, run: RunWork) -> ChatAnswer:
            return await run(partial(ChatAnswer, body, await model.formats.current()))

        return await responder().respond(request, caller, take, ChatRequest, answer_to)

    store = ResponseStore(
        settings.max_stored_bytes, is_shared=are_shared, weights=settings.keys.weights
    )

    @app.post("/v1/responses", dependencies=with_key)
    async def responses(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(
            body: ResponsesRequest, model: ServedModel, run: RunWork
        ) -> ResponsesAnswer:
            chains = ResponseChains(store, caller.tenant)
            return await chains.answer(body, model.formats, take)

        return await responder().respond(request, caller, take, ResponsesRequest, answer_to)

    @app.post("/v1/responses/compact", dependencies=with_key)
    async def compact(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(
            body: ResponsesRequest, model: ServedModel, run: RunWork
        ) -> CompactionAnswer:
            found = ResponseChains(store, caller.tenant).conversation(body, take)
            chat = compaction_chat(found.chat, await model.formats.context_tokens())
            return await run(partial(CompactionAnswer, chat, await model.formats.current()))

        return await responder().respond(request, caller, take, ResponsesRequest, answer_to)

    @app.post("/v1/responses/input_tokens", dependencies=with_key)
    async def input_tokens(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def result_of(
            body: ResponsesRequest, model: ServedModel, run: RunWork
        ) -> dict[str, Any]:
            found = ResponseChains(store, caller.tenant).conversation(body, take)
            tokens = await tokenize_chat(model.fleet, model.formats, found.chat, run)
            return {"object": "response.input_tokens", "input_tokens": tokens.count}

        return await responder().do_task(request, caller, take, ResponsesRequest, result_of)

    @app.get("/v1/responses/{response_id}", dependencies=with_key)
    async def stored_response(
        response_id: str, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        found = ResponseChains(store, caller.tenant).find(response_id)
        take(found.num_bytes)
        return WholeResponse(found.response)

    @app.delete("/v1/responses/{response_id}", dependencies=with_key)
    async def delete_response(response_id: str, caller: Caller = with_caller) -> Response:
        ResponseChains(store, caller.tenant).delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.post(MESSAGES_PATH, dependencies=with_key)
    async def messages(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def answer_to(
            body: MessagesRequest, model: ServedModel, run: RunWork
        ) -> MessagesAnswer:
            return await run(partial(MessagesAnswer, body, await model.formats.current()))

        return await responder().respond(request, caller, take, MessagesRequest, answer_to)

    @app.post(f"{MESSAGES_PATH}/count_tokens", dependencies=with_key)
    async def count_tokens(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def result_of(
            body: ConversationRequest, model: ServedModel, run: RunWork
        ) -> dict[str, Any]:
            tokens = await tokenize_chat(model.fleet, model.formats, body.chat, run)
            return {"input_tokens": tokens.count}

        return await responder().do_task(request, caller, take, ConversationRequest, result_of)

    @app.post("/tokenize", dependencies=with_key)
    async def tokenize(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def result_of(
            body: TokenizeRequest, model: ServedModel, run: RunWork
        ) -> dict[str, Any]:
            result = await tokenize_result(model.fleet, model.formats, body, run)
            take(TOKEN_BYTES * result["count"])
            return result

        return await responder().do_task(request, caller, take, TokenizeRequest, result_of)

    @app.post("/detokenize", dependencies=with_key)
    async def detokenize(
        request: Request, caller: Caller = with_caller, take: Take = with_body
    ) -> Response:
        async def result_of(
            body: DetokenizeRequest, model: ServedModel, run: RunWork
        ) -> dict[str, Any]:
            most = settings.max_answer_bytes // VALUE_BYTES  # a token may have a hundred characters
            if len(body.tokens) > most:
                raise invalid("tokens", f"got {len(body.tokens)}; must be at most {most}")
            take(VALUE_BYTES * len(body.tokens))
            return await detokenize_result(model.fleet, body)

        return await responder().do_task(request, caller, take, DetokenizeRequest, result_of)

    async def shown(name: str) -> dict[str, Any]:
        model = find_model(responder().models, name, settings.aliases)
        return {"created": started, **await shown_model(name, model)}

    @app.get("/v1/models", dependencies=[with_viewer])
    async def models() -> Response:
        names = [*settings.models, *(one for one in settings.aliases if one != ANY_NAME)]
        return JSONResponse({"object": "list", "data": [await shown(name) for name in names]})

    @app.get("/v1/models/{name:path}", dependencies=[with_viewer])
    async def one_model(name: str) -> Response:
        return JSONResponse(await shown(name))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        for model in responder().models.values():
            if not await model.fleet.is_ready():
                raise ApiError(503, "the model server is not ready")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics(caller: Caller = with_viewer) -> Response:
        caller.check_sees_all()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.include_router(live_routes(lambda: responder().models, require_key))
    return app


def end_live_view(app: FastAPI) -> None:
    """Ends events that never end by themselves, when the server takes no new requests."""
    for model in app.state.responder.models.values():
        for feed in model.feeds:
            feed.close()


async def end_answers(app: FastAPI) -> None:
    """Ends unfinished answers with an error, and cancels their jobs."""
    models = app.state.responder.models.values()
    await asyncio.gather(*(model.fleet.close() for model in models))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return no_such_route().response(request.url.path)
    message = error.detail
    if error.status_code == 405:
        takes = (error.headers or {}).get("Allow", "another method")
        message = f"the route does not take {request.method}; it takes {takes}"
    answer = ApiError(error.status_code, message, headers=error.headers)
    return answer.response(request.url.path)
