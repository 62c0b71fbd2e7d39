"""The gateway's application, for tests without a model server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from fastserve_client.key_file import NamedKey
from fastserve_client.model_description import ModelDescription
from fastserve_gateway.auth import ApiKeys
from fastserve_gateway.settings import GatewaySettings

PICTURE = "x" * 40_000
MAX_BODY_BYTES = 1 << 20


def settings(
    *keys: str,
    url: str = "grpc://127.0.0.1:9",
    max_held_bytes: int = 4 << 20,
    max_stored_bytes: int = 0,
) -> GatewaySettings:
    return GatewaySettings(
        urls=[url],
        models=["fastserve"],
        keys=ApiKeys([NamedKey("", 1.0, key, None) for key in keys]),
        strict=False,
        max_body_bytes=MAX_BODY_BYTES,
        max_held_bytes=max_held_bytes,
        max_jobs=8,
        max_moves=3,
        max_stored_bytes=max_stored_bytes,
    )


class Pictures:
    """A client whose watch always has a next picture."""

    only_streams = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.num_shown = 0
        self.is_watched = False
        self.num_answers = 0

    def watch(self, interval_s: float) -> Self:
        self.is_watched = True
        return self

    async def next_json(self) -> str:
        await asyncio.sleep(0)
        self.num_shown += 1
        return PICTURE

    async def describe(self, *, timeout_s: float) -> ModelDescription:
        return ModelDescription(max_model_len=2048, chat_template=None)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        self.num_answers += 1
        return ""

    async def close(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.is_watched = False
