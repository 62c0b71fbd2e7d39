"""What ``fastserve launch`` starts coding agents with. The programs here say what they get."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from running_gateway import RunningGateway
from tiny_model import engine_options
from tool_model import save_tool_model

TIMEOUT_S = 120.0
START_TIMEOUT_S = 300.0
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


# --- a server and a gateway of its own ------------------------------------------------------------

ASK = """#!{python}
import json, os, signal, sys, time, urllib.request
from pathlib import Path

fields = dict(one.split("=", 1) for one in sys.argv[2::2] if "=" in one)
url = json.loads(fields["model_providers.fastserve.base_url"])
body = json.dumps({{"model": json.loads(fields["model"]), "input": "Hi", "max_output_tokens": 2}})
asked = urllib.request.Request(
    url + "/responses", body.encode(), {{"Content-Type": "application/json"}}
)
with urllib.request.urlopen(asked, timeout={timeout_s}) as answer:
    print(json.dumps([url, json.load(answer)["model"]]), flush=True)
if sys.argv[-1] == "wait":
    signal.pause()
sys.exit(7)
"""


@pytest.fixture
def asking(programs: Path) -> Path:
    """A directory with a ``codex`` that asks its gateway something, and ends with 7."""
    text = ASK.format(python=sys.executable, timeout_s=TIMEOUT_S)
    (programs / "codex").write_text(text, encoding="utf-8")
    return programs


@pytest.fixture
def served(tmp_path: Path) -> str:
    """The arguments of ``fastserve serve`` for a small model."""
    model = save_tool_model(tmp_path)
    flags = {name: value for name, value in engine_options(model).items() if name != "model"}
    options = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
    return " ".join([str(model), *options])


def start(asking: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PATH": f"{asking}:{os.environ['PATH']}", "COLUMNS": "500"}
    return subprocess.Popen(
        [sys.executable, "-m", "fastserve_backend", "launch", "codex", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def is_open(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((str(address.hostname), address.port or 0)) == 0


def test_a_server_and_a_gateway_of_its_own(asking: Path, served: str) -> None:
    with start(asking, "--serve", f"{served} --name small") as launched:
        output, errors = launched.communicate(timeout=START_TIMEOUT_S)
    assert launched.returncode == 7, errors
    url, model = json.loads(output)
    assert model == "small"
    assert f"codex: small at {url}, with a context of " in errors
    assert not is_open(url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(asking: Path, served: str, number: signal.Signals) -> None:
    with start(asking, "--serve", served, "--", "wait") as launched:
        assert launched.stdout is not None
        url, _ = json.loads(launched.stdout.readline())
        # Ctrl-C of a terminal goes to its whole group, and other signals to the command alone.
        if number == signal.SIGINT:
            os.killpg(launched.pid, number)
        else:
            launched.send_signal(number)
        launched.communicate(timeout=START_TIMEOUT_S)
    assert launched.returncode == 128 + number
    assert not is_open(url)


def test_a_server_that_does_not_start(asking: Path) -> None:
    with start(asking, "--serve", "/no/such/model") as launched:
        _, errors = launched.communicate(timeout=START_TIMEOUT_S)
    assert launched.returncode == 1
    assert "fastserve serve ended with code 1: " in errors
    assert "/no/such/model" in errors


def test_mistakes_before_a_start(asking: Path) -> None:
    error = launch(asking, "codex", "--serve", "model", "--url", "http://127.0.0.1:1")
    assert "serve: not allowed with --url" in error
    error = launch(asking, "codex", "--serve", "'model")
    assert "close each quote" in error
