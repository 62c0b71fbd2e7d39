"""A tenant that sends what costs much: each request is nearly or wholly valid, and dear.

It runs as a program, ``attacker.py URL KEY SEED [KIND …]``, until its standard input ends. It
prints a line when it begins, and ``Counts`` as JSON at the end. It stands for a machine of its own.
So its own work must not delay the others: it has a low priority, and a session of its own, because
Linux divides the processor by session (sched(7), *The autogroup feature*).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from fastserve_client.protocol import MODEL_NAME

PATIENCE_S = 30.0
"""For which the attacker waits for an answer. Then it goes away, which is one more attack."""
HELD_S = 5.0
"""For which it keeps a connection open that it neither finishes nor reads."""
ATTACKS_AT_ONCE = 6
NICENESS = 10
"""The attacker's own work counts a tenth of the server's and of the honest clients'."""
BEGUN = "begun\n"
END_TIMEOUT_S = 120.0
"""In which its last requests end."""
BODY_BYTES = 1 << 19
ENDLESS = "for ever"
"""The server's chat template does not end at a message with this content."""
MESSAGES = [{"role": "user", "content": "x"}]
KINDS = [
    "long_wrong_list",
    "tool_schema_with_a_long_name",
    "unknown_fields",
    "deep_json",
    "many_answers",
    "log_probabilities",
    "slow_grammar",
    "endless_template",
    "text_to_tokenize",
    "stored_response",
    "long_jobs",
    "unfinished_body",
    "unfinished_headers",
    "many_headers",
    "stream_that_nobody_reads",
]

Attack = Callable[[], Awaitable[object]]


@dataclass
class Counts:
    """What an attacker has done so far."""

    sent: Counter[str] = field(default_factory=Counter)
    """Requests by kind."""
    statuses: Counter[str] = field(default_factory=Counter)
    """Their answers, or the errors in their place."""
    busy_s: float = 0.0
    """The attacker's own processor time."""

    def add(self, other: Counts) -> None:
        self.sent += other.sent
        self.statuses += other.statuses
        self.busy_s += other.busy_s


@contextmanager
def attacking(url: str, key: str, kinds: Sequence[str] = (), *, seed: int = 0) -> Iterator[Counts]:
    """Attacks while the block runs, from a process of low priority. The counts are there at the
    end.

    Args:
        kinds: the attacks, which are names of ``KINDS``; empty: all in random order.
        seed: of the order.
    """
    command = [sys.executable, __file__, url, key, str(seed), *kinds]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    counts = Counts()
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == BEGUN
            yield counts
            printed, _ = process.communicate(timeout=END_TIMEOUT_S)
            assert process.returncode == 0
            sent, statuses, busy_s = json.loads(printed)
            counts.add(Counts(Counter(sent), Counter(statuses), busy_s))
        finally:
            process.kill()


class Attacker:
    """
    Args:
        url: of the gateway.
        key: of this tenant.
        kinds: names of ``KINDS``; empty: all.
        seed: of their order.
    """

    def __init__(self, url: str, key: str, kinds: Sequence[str], seed: int) -> None:
        self.counts = Counts()
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._headers = {"Authorization": f"Bearer {key}"}
        self._url = url
        self._numbers = itertools.count()
        self._rng = random.Random(seed)
        self._kinds: dict[str, Attack] = {
            name: getattr(self, f"_{name}") for name in kinds or KINDS
        }

    async def run(self, over: asyncio.Event) -> None:
        """Has ``ATTACKS_AT_ONCE`` requests under way at any time until it is ``over``."""
        async with (
            httpx2.AsyncClient(timeout=PATIENCE_S, headers=self._headers) as self._http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(ATTACKS_AT_ONCE):
                group.create_task(self._go_on(over))

    async def _go_on(self, over: asyncio.Event) -> None:
        turn: list[str] = []
        while not over.is_set():
            turn = turn or self._rng.sample(list(self._kinds), len(self._kinds))
            kind = turn.pop()
            self.counts.sent[kind] += 1
            # A gateway may close what it does not want to serve, at any time.
            with suppress(httpx2.HTTPError, OSError, asyncio.IncompleteReadError):
                await self._kinds[kind]()

    async def _post(self, path: str, body: bytes | dict[str, object]) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            answer = await self._http.post(
                self._url + path, content=content, headers={"Content-Type": "application/json"}
            )
        except httpx2.HTTPError as error:
            self.counts.statuses[type(error).__name__] += 1
            raise
        self.counts.statuses[str(answer.status_code)] += 1

    async def _long_wrong_list(self) -> None:
        numbers = b",".join([b"1"] * (BODY_BYTES // 2))
        body = json.dumps({"model": MODEL_NAME, "max_tokens": 1, "messages": MESSAGES}).encode()
        await self._post("/v1/messages", body[:-1] + b',"stop_sequences":[' + numbers + b"]}")

    async def _tool_schema_with_a_long_name(self) -> None:
        children = {f"{number:x}": {} for number in range(BODY_BYTES // 20)}
        inner = {"a" * (BODY_BYTES // 2): {"properties": children}}
        function = {"name": "f", "parameters": {"type": "object", "properties": inner}}
        tools = [{"type": "function", "function": function}]
        await self._post(
            "/v1/chat/completions", {"model": MODEL_NAME, "messages": MESSAGES, "tools": tools}
        )

    async def _unknown_fields(self) -> None:
        unknown = {f"unknown-{number}": 1 for number in range(BODY_BYTES // 20)}
        await self._post(
            "/v1/completions", {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1} | unknown
        )

    async def _deep_json(self) -> None:
        depth = BODY_BYTES // 2
        await self._post("/v1/completions", b'{"prompt":' + b"[" * depth + b"]" * depth + b"}")

    async def _many_answers(self) -> None:
        request = {"model": MODEL_NAME, "prompt": ["x"] * 100, "n": 100, "max_tokens": 100}
        await self._post("/v1/completions", request)

    async def _log_probabilities(self) -> None:
        prompt = [5 + number % 100 for number in range(200)]
        request = {"model": MODEL_NAME, "prompt": [prompt], "max_tokens": 40, "n": 4}
        await self._post("/v1/completions", request | {"logprobs": 20, "prompt_logprobs": 20})

    async def _slow_grammar(self) -> None:
        number = next(self._numbers)
        factors = [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]
        schema = {"title": str(number), "allOf": factors}
        request = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}
        await self._post(
            "/v1/completions", request | {"structured_output": {"json_schema": schema}}
        )

    async def _endless_template(self) -> None:
        messages = [{"role": "user", "content": ENDLESS}]
        await self._post("/v1/chat/completions", {"model": MODEL_NAME, "messages": messages})

    async def _text_to_tokenize(self) -> None:
        text = f"{next(self._numbers)} " + "ab " * (BODY_BYTES // 3)
        await self._post("/tokenize", {"model": MODEL_NAME, "prompt": text})

    async def _stored_response(self) -> None:
        request = {"model": MODEL_NAME, "input": "Hi", "max_output_tokens": 1}
        await self._post("/v1/responses", request | {"user": "u" * BODY_BYTES})

    async def _long_jobs(self) -> None:
        request = {"model": MODEL_NAME, "max_tokens": 200, "ignore_eos": True}
        prompts = [f"{next(self._numbers)} long" for _ in range(16)]
        await self._post("/v1/completions", request | {"prompt": prompts})

    async def _unfinished_body(self) -> None:
        await self._hold(self._head(BODY_BYTES) + b" " * (BODY_BYTES - 1))

    async def _unfinished_headers(self) -> None:
        await self._hold(self._head(1)[:-4])

    async def _many_headers(self) -> None:
        more = b"".join(b"X-%d: y\r\n" % number for number in range(10_000))
        await self._hold(self._head(1)[:-2] + more + b"\r\n")

    async def _stream_that_nobody_reads(self) -> None:
        request = {"model": MODEL_NAME, "prompt": ["x"] * 8, "max_tokens": 200, "stream": True}
        body = json.dumps(request | {"ignore_eos": True, "logprobs": 5}).encode()
        await self._hold(self._head(len(body)) + body)

    def _head(self, num_bytes: int) -> bytes:
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {self._host}",
            *(f"{name}: {value}" for name, value in self._headers.items()),
            "Content-Type: application/json",
            f"Content-Length: {num_bytes}",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    async def _hold(self, sent: bytes) -> None:
        """Sends it, and reads nothing for a while, or until the gateway closes."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(sent)
            with suppress(TimeoutError):
                async with asyncio.timeout(HELD_S):
                    await writer.drain()
                    await reader.read(1)
                    await asyncio.sleep(HELD_S)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def main() -> None:
    _, url, key, seed, *kinds = sys.argv
    os.nice(NICENESS)
    with suppress(OSError):  # a kernel without it has no sessions to divide by
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")
    attacker, over = Attacker(url, key, kinds, int(seed)), asyncio.Event()
    print(BEGUN, end="", flush=True)

    async def await_end() -> None:
        await asyncio.to_thread(sys.stdin.read)
        over.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(await_end())
        group.create_task(attacker.run(over))
    print(json.dumps([attacker.counts.sent, attacker.counts.statuses, time.process_time()]))


if __name__ == "__main__":
    asyncio.run(main())
