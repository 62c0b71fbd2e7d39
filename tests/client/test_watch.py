"""A watch reads pictures with unknown or missing fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastserve_client.aio_watch import AsyncEngineWatch
from fastserve_client.engine_state import ListedJob, PriorityState
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


# What the first servers sent.
_JOB = json.loads("""{
    "number": 7, "state": "running", "level": 0, "prompt_tokens": 8, "output_tokens": 1,
    "device_blocks": 1, "host_blocks": 0, "waited_s": 0.5, "num_preemptions": 0
}""")
_PICTURE = json.loads("""{
    "time_s": 1.0, "policy": "fcfs", "policy_description": "fcfs", "block_size": 16,
    "levels": [{"quantum_s": null, "num_jobs": 1}], "running": 1, "waiting": 0, "swapped": 0,
    "device": {"used_blocks": 1, "num_blocks": 9}, "host": {"used_blocks": 0, "num_blocks": 0},
    "totals": {
        "prompt_tokens": 8, "generation_tokens": 1, "iterations": 1, "preemptions": 0,
        "demotions": 0, "promotions": 0, "swap_out_bytes": 0, "swap_in_bytes": 0,
        "worker_restarts": 0
    }
}""") | {"jobs": [_JOB]}


async def _read(picture: dict[str, Any]) -> Any:
    request = build_watch_request("fastserve", 0.1)
    async with AsyncEngineWatch(lambda *_: Call(json.dumps(picture)), request, "grpc://h") as watch:
        return await anext(watch)


async def test_what_an_older_server_does_not_send_has_its_default() -> None:
    state = await _read(_PICTURE)
    (job,) = state.jobs
    assert (job.priority, job.tenant, job.ttft_slo_s, job.late_s) == (0, "", None, None)
    assert state.priorities == ()


async def test_what_a_newer_server_sends_besides_is_ignored() -> None:
    newer = {
        "device": {**_PICTURE["device"], "new": 1},
        "jobs": [{**_JOB, "priority": -1, "new": 1}],
        "priorities": [{"priority": -1, "num_jobs": 1, "new": 1}],
        "new": [1],
    }
    state = await _read(_PICTURE | newer)
    assert state.jobs == (ListedJob(**_JOB, priority=-1),)
    assert state.priorities == (PriorityState(-1, 1),)
    assert state.device.num_blocks == 9
