"""A server loads a model by its hub id from the cache alone."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import huggingface_hub.constants
import pytest
from fastserve_backend.config import EngineConfig
from running_server import running_server
from serving_client import GENERATE, post
from tiny_model import START_TIMEOUT_S, engine_options
from waiting import wait_for

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEXT_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def repository(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``owner/tiny`` in a cache of its own, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(tiny_model, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository


def test_a_restarted_server_has_the_commit_that_it_started_with(
    repository: Path, tmp_path: Path
) -> None:
    config = EngineConfig().with_keys(**engine_options(Path("owner/tiny")))
    with running_server(config, tmp_path / "server.log") as server:
        request = {"text_input": "Hello", "max_tokens": 8, "temperature": 0.0}
        answer = post(server.endpoints.http_url, GENERATE, request).json()
        assert "text_output" in answer
        (repository / "refs" / "main").write_text(NEXT_COMMIT)  # its files are not here
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.restarts == 1, START_TIMEOUT_S)
        assert post(server.endpoints.http_url, GENERATE, request).json() == answer
