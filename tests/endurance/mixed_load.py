"""Sends requests of every kind over every API at a steady rate, and checks each answer."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
from byte_tokenizer import NUM_ASCII_TOKENS
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import AsyncFastServeClient, InvalidRequest
from fastserve_client.protocol import MODEL_NAME
from serving_client import GENERATE, GENERATE_STREAM, generate, server_sent_events

DEADLINE_S = 120.0
"""Time limit of each request; most take less than a second."""
WORDS = tuple(f"w{number:x}" for number in range(300))
"""Words of all prompts. The tokenizer caches 10,000 words, so all of these are soon cached."""
LONGEST_PROMPT, LONGEST_OUTPUT = 20, 24
LONG = 400
"""Tokens of an answer whose client leaves after the first ones."""
BURST, BURST_PROMPT, BURST_OUTPUT = 8, 400, 60
"""Requests of a burst, and their tokens: they need more KV than the device has."""
BURST_EVERY = 200
"""One in this many requests is a burst."""
CODE = r"\d{3}-[a-f]{2}"

Kind = Callable[[], Awaitable[None]]


class MixedLoad:
    """``sent`` counts requests by kind, ``num_jobs`` those that become jobs, and ``num_refused``
    those that the model refuses."""

    def __init__(self, endpoints: Endpoints, gateway_url: str) -> None:
        self.sent: Counter[str] = Counter()
        self.num_jobs = 0
        self.num_refused = 0
        self._endpoints = endpoints
        self._gateway_url = gateway_url
        self._rng = random.Random(11)
        self._kinds: list[Kind] = [
            *[self._grpc] * 6,
            self._grpc_channel,
            self._grpc_cancelled,
            self._grpc_refused,
            *[self._generate] * 4,
            self._generate_refused,
            *[self._generate_stream] * 4,
            self._generate_stream_cancelled,
            *[self._completion] * 4,
            *[self._completion_stream] * 4,
            *[self._completion_cancelled] * 2,
            self._completion_refused,
            self._completion_of_no_model,
            self._structured,
            *[self._chat] * 3,
            *[self._chat_stream] * 3,
            self._scrapes,
        ]

    async def run(self, seconds: float, requests_per_s: float) -> None:
        """Runs the load; returns when all requests have ended and their connections are closed."""
        loop = asyncio.get_running_loop()
        async with (
            httpx2.AsyncClient(timeout=DEADLINE_S) as self._http,
            AsyncFastServeClient(f"grpc://{self._endpoints.grpc_url}") as self._client,
            asyncio.TaskGroup() as group,
        ):
            started_s = loop.time()
            turn: list[Kind] = []
            for number in range(round(seconds * requests_per_s)):
                await asyncio.sleep(started_s + number / requests_per_s - loop.time())
                turn = turn or self._rng.sample(self._kinds, len(self._kinds))
                kind = self._burst if number % BURST_EVERY == 0 else turn.pop()
                self.sent[kind.__name__.strip("_")] += 1
                group.create_task(asyncio.wait_for(kind(), DEADLINE_S))

    def _prompt(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, LONGEST_PROMPT)))

    def _output(self) -> int:
        return self._rng.randint(1, LONGEST_OUTPUT)

    async def _grpc(self) -> None:
        self.num_jobs += 1
        wanted = self._output()
        chunks = self._client.stream(self._prompt(), max_tokens=wanted, ignore_eos=True)
        received = [chunk async for chunk in chunks]
        assert sum(len(chunk.token_ids) for chunk in received) == wanted
        assert [chunk.finish_reason for chunk in received if chunk.finish_reason] == ["length"]

    async def _grpc_channel(self) -> None:
        """Sends it by Triton's own client, which opens a channel for each stream."""
        self.num_jobs += 1
        request = {"text_input": self._prompt(), "max_tokens": self._output(), "stream": True}
        answer = await asyncio.to_thread(generate, self._endpoints.grpc_url, **request)
        assert answer.error is None, answer.error
        assert answer.num_finals == 1

    async def _grpc_cancelled(self) -> None:
        self.num_jobs += 1
        num_read, wanted = 0, self._rng.randint(1, 4)
        async with self._client.stream(self._prompt(), max_tokens=LONG, ignore_eos=True) as chunks:
            async for _ in chunks:  # on a busy machine there may be fewer, with more tokens
                num_read += 1
                if num_read == wanted:
                    break

    async def _grpc_refused(self) -> None:
        self.num_refused += 1
        try:
            await self._client.generate(self._prompt(), max_tokens=0)
        except InvalidRequest:
            return
        raise AssertionError("max_tokens 0 was not refused")

    async def _generate(self) -> None:
        self.num_jobs += 1
        body = {"text_input": self._prompt(), "max_tokens": self._output()}
        response = await self._http.post(self._endpoints.http_url + GENERATE, json=body)
        assert "text_output" in response.json(), response.text

    async def _generate_refused(self) -> None:
        self.num_refused += 1
        body = {"text_input": self._prompt(), "max_tokens": 0}
        response = await self._http.post(self._endpoints.http_url + GENERATE, json=body)
        assert response.status_code == 400, response.text

    async def _generate_stream(self) -> None:
        self.num_jobs += 1
        body = {
            "text_input": self._prompt(),
            "max_tokens": self._output(),
            "stream": True,
            "return_finish_reason": True,
        }
        response = await self._http.post(self._endpoints.http_url + GENERATE_STREAM, json=body)
        events = list(server_sent_events(iter(response.text.split("\n"))))
        assert response.status_code == 200, response.text
        reasons = [event.get("finish_reason") for event in events]
        assert reasons.pop() in ("length", "stop"), response.text
        assert not any(reasons)

    async def _generate_stream_cancelled(self) -> None:
        body = {
            "text_input": self._prompt(),
            "stream": True,
            "sampling_parameters": json.dumps({"max_tokens": LONG, "ignore_eos": True}),
        }
        await self._give_up(self._endpoints.http_url + GENERATE_STREAM, body)

    async def _completion(self) -> None:
        fields = {"prompt": self._prompt(), "max_tokens": self._output(), "ignore_eos": True}
        self.num_jobs += 2
        answer = await self._post("completions", fields | {"n": 2})
        assert answer["usage"]["completion_tokens"] == 2 * fields["max_tokens"]

    async def _completion_stream(self) -> None:
        fields = {"prompt": self._prompt(), "max_tokens": self._output(), "ignore_eos": True}
        await self._stream("completions", fields)

    async def _completion_cancelled(self) -> None:
        fields = {"prompt": self._prompt(), "max_tokens": LONG, "ignore_eos": True, "stream": True}
        await self._give_up(self._url("completions"), fields | {"model": MODEL_NAME})

    async def _completion_refused(self) -> None:
        self.num_refused += 1
        fields = {"prompt": self._prompt(), "max_tokens": 10**6}
        answer = await self._post("completions", fields, status=400)
        assert answer["error"]["code"] == "context_length_exceeded"

    async def _completion_of_no_model(self) -> None:
        answer = await self._post("completions", {"prompt": "a", "model": "none"}, status=404)
        assert answer["error"]["code"] == "model_not_found"

    async def _structured(self) -> None:
        self.num_jobs += 1
        form = {"structured_output": {"regex": CODE}}
        answer = await self._post("completions", {"prompt": self._prompt(), **form})
        assert re.fullmatch(CODE, answer["choices"][0]["text"]), answer

    async def _chat(self) -> None:
        self.num_jobs += 1
        answer = await self._post("chat/completions", self._conversation())
        assert answer["choices"][0]["finish_reason"] in ("length", "stop"), answer

    async def _chat_stream(self) -> None:
        await self._stream("chat/completions", self._conversation())

    async def _burst(self) -> None:
        self.num_jobs += BURST
        prompts = [
            self._rng.choices(range(3, NUM_ASCII_TOKENS), k=BURST_PROMPT) for _ in range(BURST)
        ]
        options: Any = {"max_tokens": BURST_OUTPUT, "ignore_eos": True}
        for answer in await asyncio.gather(
            *(self._client.generate(prompt, **options) for prompt in prompts)
        ):
            assert answer.num_output_tokens == BURST_OUTPUT

    async def _scrapes(self) -> None:
        gateway, server = self._gateway_url, self._endpoints.metrics_url
        for url in (server, f"{gateway}/metrics", f"{gateway}/health", f"{gateway}/v1/models"):
            response = await self._http.get(url)
            assert response.status_code == 200, response.text

    def _conversation(self) -> dict[str, Any]:
        message = {"role": "user", "content": self._prompt()}
        return {"messages": [message], "max_tokens": self._output()}

    def _url(self, route: str) -> str:
        return f"{self._gateway_url}/v1/{route}"

    async def _post(self, route: str, fields: dict[str, Any], status: int = 200) -> Any:
        response = await self._http.post(self._url(route), json={"model": MODEL_NAME} | fields)
        assert response.status_code == status, response.text
        return response.json()

    async def _stream(self, route: str, fields: dict[str, Any]) -> None:
        self.num_jobs += 1
        body = {"model": MODEL_NAME, "stream": True, **fields}
        response = await self._http.post(self._url(route), json=body)
        lines = response.text.split("\n")
        assert [line for line in lines if line][-1] == "data: [DONE]", response.text
        events = server_sent_events(line for line in lines if line != "data: [DONE]")
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons.pop() in ("length", "stop"), response.text
        assert not any(reasons)

    async def _give_up(self, url: str, body: dict[str, Any]) -> None:
        """Opens a stream, and closes its connection after the first tokens."""
        self.num_jobs += 1
        async with self._http.stream("POST", url, json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_bytes():
                break
