"""A watch reads pictures with unknown or missing fields."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_client.aio_watch import AsyncEngineWatch
from fastserve_client.errors import ServerError
from fastserve_client.request import build_watch_request


class Call:
    """A call that answers with one picture each time."""

    def __init__(self, picture: str) -> None:
        self._picture = picture

    async def __anext__(self) -> dict[str, Any]:
        return {"engine_state": [self._picture]}

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    "picture", ["{}", "[]", "null", "no JSON", '{"levels": [{"x": 1}], "jobs": [], "new": 1}']
)
async def test_a_picture_of_another_version_is_the_servers_error(picture: str) -> None:
    request = build_watch_request("fastserve", 0.1)
    async with AsyncEngineWatch(lambda *_: Call(picture), request, "grpc://h:1") as watch:
        with pytest.raises(ServerError, match="is it a fastserve model of this version"):
            await anext(watch)
