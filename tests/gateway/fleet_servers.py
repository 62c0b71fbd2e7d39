"""Servers of a fleet that only refuse or answer, in place of clients."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

from fastserve_client.errors import ClientError, ConnectionFailed, ServerOverloaded
from fastserve_client.results import Chunk, Completion
from fastserve_gateway.fleet.fleet import Fleet
from fastserve_gateway.fleet.fleet_metrics import FleetMetrics
from prometheus_client import CollectorRegistry

CHUNKS = [Chunk("a", (1,), None, 1), Chunk("b", (2,), "length", 1)]
MAX_MOVES = 3
FULL = ServerOverloaded("4 requests are queued already; try again later")
GONE = ConnectionFailed("gone")
NO_TRACE: dict[str, Any] = {"request_id": "", "trace_context": None}


@dataclass
class Server:
    """A client whose server answers, or fails so many chunks later. It fails with ``rest_error``
    where it is to go on with an answer."""

    error: ClientError | None = None
    num_chunks: int = 0
    rest_error: ClientError | None = None
    num_jobs: int = 0
    num_read: int = 0
    options: list[dict[str, Any]] = field(default_factory=list)
    read: list[Chunk] = field(default_factory=list)
    closed: bool = False
    hangs: bool = False
    num_answers: int = 0
    only_streams: bool = False
    drops: asyncio.Event = field(default_factory=asyncio.Event)
    model: str = "m"
    endpoint: str = "its URL"

    def watch(self, interval_s: float) -> Server:
        return Server(hangs=True, drops=self.drops) if self.hangs else Server(FULL)

    async def is_ready(self) -> bool:
        return True  # as Triton says of a model that hangs

    def drop_calls(self) -> None:
        self.drops.set()
        self.drops = asyncio.Event()

    async def close(self) -> None:
        pass

    def stream(self, prompt: str, **options: Any) -> Self:
        self.num_jobs += 1
        self.num_read = 0
        so_far = list(options.get("output_ids_so_far", ()))
        self.options.append({**options, "output_ids_so_far": so_far})
        self.read = CHUNKS[len(so_far) :]
        return self

    async def generate(self, prompt: str, **options: Any) -> Completion:
        async with self.stream(prompt) as chunks:
            return Completion.from_chunks([chunk async for chunk in chunks])

    async def detokenize(self, token_ids: list[int]) -> str:
        if self.hangs:
            await self.drops.wait()
            raise GONE
        return (await anext(self.stream(""))).text

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.closed = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self.hangs and self.num_read == self.num_chunks:
            await self.drops.wait()
            raise GONE
        self.num_answers += 1
        if self.rest_error is not None and self.options[-1]["output_ids_so_far"]:
            raise self.rest_error
        if self.error is not None and self.num_read == self.num_chunks:
            raise self.error
        if not self.read:
            raise StopAsyncIteration
        self.num_read += 1
        return self.read.pop(0)


@dataclass
class Lone(Server):
    """The only server of a model, which is lost with its first answer until it is ``back``."""

    error: ClientError | None = GONE
    num_chunks: int = 1
    back: bool = False
    num_questions: int = 0

    async def detokenize(self, token_ids: list[int]) -> str:
        self.num_questions += 1
        if not self.back:
            raise GONE
        self.error = self.rest_error
        return ""


def fleet_of(*servers: Server, max_moves: int = MAX_MOVES) -> Fleet:
    clients: dict[str, Any] = {f"server {n}": server for n, server in enumerate(servers)}
    return Fleet("m", clients, FleetMetrics(CollectorRegistry()), max_moves)


def total(fleet: Fleet, name: str) -> float:
    """A metric of all servers together."""
    counter = getattr(fleet._metrics, name)
    return sum(
        sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    )


async def text_of(fleet: Fleet, prompt: str = "Hello") -> str:
    async with aclosing(fleet.stream(prompt, **NO_TRACE)) as chunks:
        return "".join([chunk.text async for chunk in chunks])
