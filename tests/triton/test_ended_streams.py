"""Streams that are closed at their last chunk leave nothing in the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_client import AsyncFastServeClient, FastServeClient
from running_server import running_server

# Of streams that are cancelled in that moment, tritonserver 24.10 keeps one in four.
NUM_STREAMS = 160
AT_ONCE = 8


def close_streams(url: str) -> None:
    with FastServeClient(url) as client:
        for _ in range(NUM_STREAMS):
            with client.stream("a", max_tokens=2, ignore_eos=True) as chunks:
                while next(chunks).finish_reason is None:
                    pass


def drop_streams(url: str) -> None:
    with FastServeClient(url) as client:
        for _ in range(NUM_STREAMS):
            chunks = client.stream("a", max_tokens=2, ignore_eos=True)
            while next(chunks).finish_reason is None:
                pass
            del chunks
        client.generate("a", max_tokens=1)  # so that the last one ends, too


def close_asyncio_streams(url: str) -> None:
    async def close_one(client: AsyncFastServeClient) -> None:
        async with client.stream("a", max_tokens=2, ignore_eos=True) as chunks:
            while (await anext(chunks)).finish_reason is None:
                pass

    async def close_all() -> None:
        async with AsyncFastServeClient(url) as client:
            for _ in range(0, NUM_STREAMS, AT_ONCE):
                await asyncio.gather(*(close_one(client) for _ in range(AT_ONCE)))
            await client.generate("a", max_tokens=1)

    asyncio.run(close_all())


def cancel_asyncio_readers(url: str) -> None:
    """Tasks that wait for the end of their stream, as those of a gateway's request do."""

    async def read(client: AsyncFastServeClient, ended: asyncio.Event) -> None:
        async with client.stream("a", max_tokens=2, ignore_eos=True) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    ended.set()

    async def cancel_all() -> None:
        async with AsyncFastServeClient(url) as client:
            for _ in range(NUM_STREAMS):
                ended = asyncio.Event()
                reader = asyncio.ensure_future(read(client, ended))
                await ended.wait()
                reader.cancel()
                await asyncio.wait((reader,))
            await client.generate("a", max_tokens=1)

    asyncio.run(cancel_all())


@pytest.mark.parametrize(
    "end_streams", [close_streams, drop_streams, close_asyncio_streams, cancel_asyncio_readers]
)
def test_a_server_whose_streams_were_closed_at_their_end_unloads_its_model(
    end_streams: Callable[[str], None],
    tiny_config: EngineConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_server(tiny_config, tmp_path / "server.log") as server:
        end_streams(f"grpc://{server.endpoints.grpc_url}")
    assert "did not end after SIGTERM" not in caplog.text
