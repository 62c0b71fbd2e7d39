"""The Python examples of README and of docs/clients.md, as they stand there, on the real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastserve_backend.serving.endpoints import Endpoints

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/clients.md")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[pytest.param]:
    found = []
    for page in PAGES:
        for number, code in enumerate(_BLOCK.findall((ROOT / page).read_text(encoding="utf-8")), 1):
            if "fastserve_backend import LLM" not in code:  # needs no server
                found.append(pytest.param(code, id=f"{page}-{number}"))
    return found


@pytest.mark.parametrize("code", examples())
def test_an_example_runs(
    code: str, chat_endpoints: Endpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    at_its_port = code.replace("127.0.0.1:8001", chat_endpoints.grpc_url).replace(
        "http://127.0.0.1:8000", chat_endpoints.http_url
    )
    assert at_its_port != code
    exec(compile(at_its_port, "example", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out) > 10
