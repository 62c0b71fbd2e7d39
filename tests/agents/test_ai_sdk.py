"""The AI SDK, over each of the three APIs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from agent_program import PROGRAMS, TIMEOUT_S
from conductor import Call, Conductor, Ramble, Say
from fastserve_backend.serving.launch import TritonServer
from serving_client import unfinished_jobs
from waiting import wait_for

SCRIPT = Path(__file__).with_name("ai_sdk.mjs")


@pytest.fixture(params=["responses", "chat", "messages"])
def api(request: pytest.FixtureRequest) -> Any:
    return request.param


def run(api: str, url: str, part: str) -> Any:
    """What this part of the script prints."""
    node = shutil.which("node")
    assert node is not None
    done = subprocess.run(
        [node, "--input-type=module", "-", api, url, part],
        cwd=PROGRAMS,
        input=SCRIPT.read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_tools(playing: Conductor, api: str) -> None:
    playing.play(Call("weather", {"city": "Rome"}), Say("Clear."), Say("Clear, too."))
    assert run(api, playing.url, "tools") == {
        "text": '"Clear."',
        "results": [{"city": "Rome", "sky": "clear"}],
        "reason": "stop",
        "later": '"Clear, too."',
    }


def test_object(playing: Conductor, api: str) -> None:
    playing.aside = None
    done = run(api, playing.url, "object")
    assert done["reason"] == "stop"
    assert done["object"]["sky"] in ("clear", "cloudy")
    assert done["object"]["hours"] == [12, 12]


def test_cancels(playing: Conductor, api: str, agent_server: TritonServer) -> None:
    playing.play(Ramble())
    assert run(api, playing.url, "cancel")["size"] > 0
    wait_for(lambda: unfinished_jobs(agent_server.endpoints.metrics_url) == 0)
    playing.wait_until_ended()
    assert playing.of(Ramble()).was_cut
