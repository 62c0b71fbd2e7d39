"""Routes of the live view: the page's files, its events, and the tools of its chat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from fastapi import APIRouter, Depends
from fastserve_chat.demo import Demo
from fastserve_chat.demo_tools import NO_TOOL, run_demo_tool
from fastserve_chat.hermes_prompt import knows_tools
from fastserve_client.errors import ClientError
from starlette.responses import FileResponse, JSONResponse, Response

from fastserve_gateway.answer import event
from fastserve_gateway.auth import Caller
from fastserve_gateway.errors import from_client_error, invalid, no_such_route
from fastserve_gateway.event_stream import EventStream
from fastserve_gateway.served_models import ServedModel, find_model

_FOLDER = Path(__file__).parent / "live_page"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGE = "index.html"
EVENTS_PATH = "/live/events"
_HEADERS = {
    # Only files of this gateway, no inline script, no frame around the page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def live_routes(
    models: Callable[[], Mapping[str, ServedModel]], require_key: Callable[..., Awaitable[Caller]]
) -> APIRouter:
    """The routes.

    Args:
        models: called at each request for data.
        require_key: dependency of events and tools. The page itself has nothing to protect.
    """
    router = APIRouter()
    with_key = Depends(require_key)
    files = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}

    @router.get("/live")
    async def page() -> Response:
        return _file(files[_PAGE])

    @router.get(EVENTS_PATH)
    async def events(
        model: str | None = None, server: str = "0", caller: Caller = with_key
    ) -> Response:
        feeds = _chosen(models(), model).feeds
        if server not in map(str, range(len(feeds))):
            raise invalid("server", f"must be 0 to {len(feeds) - 1}")
        stream = feeds[int(server)].events(None if caller.sees_all else caller.tenant)
        first = await anext(stream)  # comes at once, or raises an error with its status
        return EventStream(
            first, stream, {}, lambda error: event(from_client_error(error, {}).body)
        )

    @router.get("/live/tools", dependencies=[with_key])
    async def tools(model: str | None = None) -> Response:
        try:
            template = (await _chosen(models(), model).formats.current()).template
        except ClientError as error:
            raise from_client_error(error, {}) from None
        demo = Demo.of_model(knows_tools=knows_tools(template))
        return JSONResponse(
            {
                "tools": demo.tools,
                "tool_choice": demo.tool_choice,
                "examples": demo.examples,
                "temperature": demo.temperature,
                "no_tool": NO_TOOL,
            }
        )

    @router.get("/live/servers", dependencies=[with_key])
    async def servers() -> Response:
        listed = [
            {"model": name, "server": number}
            for name, model in models().items()
            for number in range(len(model.feeds))
        ]
        return JSONResponse({"servers": listed})

    @router.get("/live/tools/{name}", dependencies=[with_key])
    async def run_tool(name: str, arguments: str = "{}") -> Response:
        return JSONResponse({"result": run_demo_tool(name, arguments)})

    @router.get("/live/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise no_such_route()
        return _file(files[name])

    return router


def _chosen(models: Mapping[str, ServedModel], name: str | None) -> ServedModel:
    """The model that a request names, or else the first."""
    return find_model(models, next(iter(models)) if name is None else name, {})


def _file(path: Path) -> Response:
    return FileResponse(path, media_type=_MEDIA_TYPES[path.suffix], headers=_HEADERS)
