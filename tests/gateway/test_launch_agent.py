"""What ``fastserve launch`` starts coding agents with. The programs here say what they get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_gateway import RunningGateway

TIMEOUT_S = 120.0
ECHO = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with a program for each agent but ``opencode``."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("claude", "codex"):
        program = directory / name
        program.write_text(ECHO.format(python=sys.executable), encoding="utf-8")
        program.chmod(0o755)
    return directory


def launch(programs: Path, *arguments: str, key: str | None = None) -> Any:
    """What the agent got: its arguments and its environment; or else the error."""
    environment = os.environ | {"PATH": str(programs), "COLUMNS": "500"}
    if key is not None:
        environment["FASTSERVE_API_KEY"] = key
    command = [sys.executable, "-m", "fastserve_backend", "launch", *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_claude(gateway: RunningGateway, programs: Path) -> None:
    url = ("--url", gateway.url)
    arguments, environment = launch(programs, "claude", *url, "--", "-p", "Hello", key="A-key")
    assert arguments == ["-p", "Hello"]
    assert environment["ANTHROPIC_BASE_URL"] == gateway.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "A-key"
    assert environment["ANTHROPIC_MODEL"] == "fastserve"
    (model,) = gateway.get("/v1/models").json()["data"]
    for name in ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"):
        assert environment[name] == str(model["max_model_len"])
    answer_tokens = int(environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"])
    assert 0 < answer_tokens <= model["max_model_len"] // 4


def test_codex(gateway: RunningGateway, programs: Path) -> None:
    arguments, environment = launch(programs, "codex", "--url", gateway.api_url, "--", "exec")
    assert arguments[-1] == "exec"
    assert arguments[:-1:2] == ["-c"] * (len(arguments) // 2)
    fields = dict(one.split("=", 1) for one in arguments[1::2])
    assert fields["model_providers.fastserve.base_url"] == json.dumps(gateway.api_url)
    assert fields["model"] == '"fastserve"'
    (model,) = gateway.get("/v1/models").json()["data"]
    assert fields["model_context_window"] == str(model["max_model_len"])
    assert environment["FASTSERVE_API_KEY"] == "none"


def test_opencode(gateway: RunningGateway, programs: Path) -> None:
    error = launch(programs, "opencode", "--url", gateway.url)
    assert "install it: npm install -g opencode-ai" in error
    (programs / "codex").rename(programs / "opencode")
    arguments, environment = launch(programs, "opencode", "--url", gateway.url)
    assert arguments == []
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    assert config["provider"][provider]["options"]["baseURL"] == gateway.api_url
    limit = config["provider"][provider]["models"][model]["limit"]
    assert 0 < limit["output"] < limit["context"]


def test_mistakes(gateway: RunningGateway, programs: Path) -> None:
    error = launch(programs, "claude", "--url", "http://127.0.0.1:1")
    assert "there is no gateway at http://127.0.0.1:1/v1/models" in error
    assert "fastserve serve" in error
    error = launch(programs, "claude", "--url", gateway.url, "--model", "other")
    assert "model: got 'other'; the gateway" in error
    assert "has fastserve" in error
    error = launch(programs, "claude", "--url", "127.0.0.1:9000")
    assert "url: got '127.0.0.1:9000'; must begin with http://" in error
