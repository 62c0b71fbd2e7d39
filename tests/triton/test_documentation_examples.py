"""The examples in README and docs/ run unchanged on the real server."""

from __future__ import annotations

import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from running_server import rank_stopped
from serving_client import wait_until_idle

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/requests.md", "docs/clients.md", "docs/traces.md")
ATTEMPTS = 3
DEADLINE_S = 120.0  # of one curl command
# Examples of other clients; tests/gateway runs those of the OpenAI client.
_OTHERS = ("fastserve_backend import LLM", "from openai import")


class Enough(Exception):
    """Ends an example that would run for ever."""


def blocks(page: str, language: str = "python") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, page
    return found


def examples() -> list[pytest.param]:
    found = []
    for page in PAGES:
        for number, code in enumerate(blocks(page), 1):
            if not any(other in code for other in _OTHERS):
                found.append(pytest.param(code, id=f"{page}-{number}"))
    return found


@pytest.mark.parametrize("code", examples())
def test_an_example_runs(
    code: str, chat_server: TritonServer, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints = chat_server.endpoints
    at_its_port = code.replace("127.0.0.1:8001", endpoints.grpc_url).replace(
        "http://127.0.0.1:8000", endpoints.http_url
    )
    assert at_its_port != code

    def printed() -> str:
        # A fast machine would generate all tokens before the time is up.
        waits_for_timeout = "except RequestTimeout" in code
        with rank_stopped(chat_server.runtime) if waits_for_timeout else nullcontext():
            exec(compile(at_its_port, "example", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    # Random answers may be short.
    assert any(len(printed()) > 10 for _ in range(ATTEMPTS))


@pytest.mark.parametrize("page", ["README.md", "docs/requests.md"])
def test_the_curl_examples_run(page: str, chat_endpoints: Endpoints) -> None:
    scripts = [text for text in blocks(page, "bash") if text.startswith("curl")]
    assert scripts
    for script in scripts:
        at_its_port = script.replace("127.0.0.1:8000", chat_endpoints.http_url.split("//")[1])
        for command in at_its_port.split("\n\n"):
            done = subprocess.run(
                ["bash", "-c", command], capture_output=True, text=True, timeout=DEADLINE_S
            )
            assert done.returncode == 0, done.stderr
            assert '"text_output":' in done.stdout or '"task_result":' in done.stdout
            assert '"error"' not in done.stdout


def test_the_offline_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (text for text in blocks("docs/get_started.md") if _OTHERS[0] in text)
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("\n") >= 4


def test_the_example_of_the_live_view_runs(endpoints: Endpoints) -> None:
    wait_until_idle(endpoints)  # other tests' jobs have ended
    (code,) = blocks("docs/live_view.md")
    at_its_port = code.replace("FastServeClient()", f'FastServeClient("{endpoints.grpc_url}")')
    assert at_its_port != code
    printed: list[tuple[object, ...]] = []

    def print_three(*values: object) -> None:
        printed.append(values)
        if len(printed) == 3:
            raise Enough

    names = {"__name__": "__main__", "print": print_three}
    with pytest.raises(Enough):
        exec(compile(at_its_port, "example", "exec"), names)
    for running, waiting, jobs_in_queues in printed:
        assert running == waiting == 0
        assert jobs_in_queues == [0] * len(jobs_in_queues) != []
