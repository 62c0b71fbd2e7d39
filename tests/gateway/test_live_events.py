"""The live view's routes and feed: all viewers share one watch and cannot slow each other down."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
from fastserve_backend.engine.watches import MAX_WATCHES
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import AsyncFastServeClient, ServerUnavailable
from fastserve_gateway.live_feed import LiveFeed
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway, running_gateway
from serving_client import server_sent_events

DEADLINE_S = 60.0
# Less than the gateway's time for unfinished answers.
STOP_LIMIT_S = 25.0


@contextmanager
def events(gateway: RunningGateway) -> Iterator[Iterator[dict[str, Any]]]:
    url = f"{gateway.url}/live/events"
    with httpx2.stream("GET", url, timeout=REQUEST_TIMEOUT_S) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield server_sent_events(response.iter_lines())


def test_the_page_loads_nothing_from_elsewhere(gateway: RunningGateway) -> None:
    page = httpx2.get(f"{gateway.url}/live", timeout=REQUEST_TIMEOUT_S)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "http" not in page.text
    for name, kind in (("main.js", "text/javascript"), ("live.css", "text/css")):
        file = httpx2.get(f"{gateway.url}/live/{name}", timeout=REQUEST_TIMEOUT_S)
        assert file.headers["content-type"].startswith(kind)
        assert file.headers["x-content-type-options"] == "nosniff"
    for name in ("nothing.js", "..%2Fapp.py", "%2e%2e/app.py", "../app.py"):
        assert (
            httpx2.get(f"{gateway.url}/live/{name}", timeout=REQUEST_TIMEOUT_S).status_code == 404
        )


def test_more_viewers_than_the_server_takes_watchers(gateway: RunningGateway) -> None:
    with ExitStack() as stack:
        viewers = [stack.enter_context(events(gateway)) for _ in range(MAX_WATCHES + 4)]
        for viewer in viewers:
            first, second = next(viewer), next(viewer)
            assert first["time_s"] < second["time_s"]
            assert first["policy"] == "skip_join_mlfq"


def test_events_need_a_key_and_the_page_does_not(endpoints: Endpoints, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-live\n", encoding="utf-8")
    flags = ["--api-keys-file", str(keys)]
    with running_gateway(endpoints.grpc_url, tmp_path / "gateway.log", *flags) as guarded:
        assert httpx2.get(f"{guarded.url}/live", timeout=REQUEST_TIMEOUT_S).status_code == 200
        url = f"{guarded.url}/live/events"
        assert httpx2.get(url, timeout=REQUEST_TIMEOUT_S).status_code == 401
        assert (
            httpx2.get(
                url, headers={"Authorization": "Bearer sk-wrong"}, timeout=REQUEST_TIMEOUT_S
            ).status_code
            == 401
        )
        headers = {"Authorization": "Bearer sk-live"}
        with httpx2.stream("GET", url, headers=headers, timeout=REQUEST_TIMEOUT_S) as response:
            assert "jobs" in next(server_sent_events(response.iter_lines()))


def test_a_gateway_that_ends_does_not_wait_for_viewers(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    with (
        running_gateway(endpoints.grpc_url, tmp_path / "gateway.log") as ending,
        events(ending) as viewer,
    ):
        next(viewer)
        ending.process.send_signal(signal.SIGTERM)
        for _ in viewer:
            pass  # to the end of the stream
        assert ending.process.wait(STOP_LIMIT_S) == 0


def test_without_a_server_viewers_are_told_but_not_where_it_is(tmp_path: Path) -> None:
    with running_gateway("grpc://127.0.0.1:9", tmp_path / "gateway.log") as lonely:
        with events(lonely) as viewer:
            errors = [next(viewer)["error"] for _ in range(2)]
        assert errors[0]["message"] == "the model server does not answer"
        assert errors[0] == errors[1]
        assert lonely.log().count("the live view has no pictures") == 1


# --- the feed itself ----------------------------------------------------------------------------


async def picture(viewer: AsyncIterator[bytes]) -> dict[str, Any]:
    """The viewer's next picture; comments are skipped."""
    while True:
        one = await asyncio.wait_for(anext(viewer), DEADLINE_S)
        if one.startswith(b"data: "):
            return json.loads(one.removeprefix(b"data: "))


async def test_a_slow_viewer_misses_pictures_and_slows_nobody(endpoints: Endpoints) -> None:
    async with AsyncFastServeClient(endpoints.grpc_url) as client, AsyncExitStack() as stack:
        feed = LiveFeed(client)
        quick = await stack.enter_async_context(aclosing(feed.events()))
        slow = await stack.enter_async_context(aclosing(feed.events()))
        began_s = (await picture(slow))["time_s"]
        times = [(await picture(quick))["time_s"] for _ in range(12)]
        assert times == sorted(set(times))
        missed = [(await picture(slow))["time_s"] for _ in range(3)]
        assert began_s < times[5] < missed[0]  # the viewer has missed the pictures in between
        assert missed[0] < missed[1] < missed[2]


async def test_the_server_is_watched_only_while_somebody_looks(endpoints: Endpoints) -> None:
    async with AsyncFastServeClient(endpoints.grpc_url) as client, AsyncExitStack() as stack:
        feed = LiveFeed(client)
        viewer = feed.events()
        await picture(viewer)
        await viewer.aclose()
        # All of the server's places for watchers are free.
        watches = [stack.enter_async_context(client.watch(0.05)) for _ in range(MAX_WATCHES)]
        for opening in watches:
            watch = await opening
            await asyncio.wait_for(accepted(watch), DEADLINE_S)
        again = feed.events()
        await asyncio.wait_for(anext(again), DEADLINE_S)
        error = (await picture(again))["error"]  # no place is left for it now
        assert "others watch already" in error["message"]
        await again.aclose()


async def accepted(watch: Any) -> None:
    """Waits for the first picture; the server may not have noticed yet that earlier watchers
    left."""
    while True:
        try:
            await anext(watch)
            return
        except ServerUnavailable:
            pass
