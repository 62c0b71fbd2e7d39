"""This project's Triton model, over gRPC or HTTP."""

from __future__ import annotations

import time

from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.errors import ConnectionFailed, ServerError
from fastserve_client.protocol import MODEL_NAME

from fastserve_bench.connection import Request, TimedAnswer


class TritonConnection:
    def __init__(self, url: str, model: str | None) -> None:
        self._client = AsyncFastServeClient(url, model=model or MODEL_NAME)

    async def check(self) -> None:
        if not await self._client.is_ready():
            client = self._client
            raise ConnectionFailed(
                f"no model {client.model!r} is ready at {client.endpoint}; "
                "start one with 'fastserve serve MODEL', or name another --url or --model"
            )

    async def send(self, request: Request, timeout_s: float) -> TimedAnswer:
        first_token_s = last_token_s = None
        num_tokens = 0
        async with self._client.stream(
            request.messages if request.chat else request.prompt,
            timeout_s=timeout_s,
            perf_metrics=True,
            max_tokens=request.max_tokens,
            ignore_eos=request.exact or None,
            temperature=0,
            **request.service.fields,
        ) as chunks:
            async for chunk in chunks:
                if chunk.token_ids:
                    last_token_s = time.monotonic()
                    first_token_s = first_token_s or last_token_s
                    num_tokens += len(chunk.token_ids)
        perf = chunk.perf
        if first_token_s is None or last_token_s is None or perf is None:
            raise ServerError("the answer had no token")
        if not chunk.num_input_tokens:
            raise ServerError("the answer did not say how many tokens its prompt had")
        return TimedAnswer(
            first_token_s,
            last_token_s,
            prompt_tokens=chunk.num_input_tokens,
            output_tokens=num_tokens,
            queued_s=(perf.first_scheduled_time_ns - perf.arrival_time_ns) / 1e9,
            num_preemptions=perf.num_preemptions,
        )

    async def close(self) -> None:
        await self._client.close()
