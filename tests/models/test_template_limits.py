"""Chat templates that loop for ever, or build huge texts, end with an error that says so. The next
request is answered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from fastserve_backend.checkpoints.chat_template import ChatTemplate, ChatTemplateError
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.template_process import (
    MAX_CHARS,
    MAX_PROCESSES,
    template_processes,
)
from fastserve_backend.engine.request_checks import RequestChecks
from fastserve_backend.errors import InvalidRequestError
from test_chat_template import VOCAB_SIZE, write_tokenizer
from waiting import wait_for

MODEL = load_model_config("opt-125m", load_format="dummy")
MESSAGES = [{"role": "user", "content": "x"}]
TIME = "exceeds 2 s of processor time; shorten the conversation, or correct the template"
MEMORY = "exceeds 512 MiB of memory; shorten the conversation, or correct the template"
TOO_LONG = f"exceeds {MAX_CHARS} characters; shorten the conversation, or correct the template"

LOOPS = {
    "nested": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "power": "{% set n = 7 ** (messages | length * 10 ** 9) %}",
}
MEMORY_HOGS = {
    "times": "{{ messages[0].content * 10 ** 10 }}",
    "list": "{{ messages * 10 ** 9 }}",
    "doubled": "{% set n = namespace(t='xx') %}{% for _ in range(60) %}{% set n.t = n.t ~ n.t %}"
    "{% endfor %}",
    "center": "{{ messages[0].content | center(10 ** 10) }}",
    "method": "{{ messages[0].content.ljust(10 ** 10) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "join": "{{ ('x' * 10 ** 7).join('x' * 10 ** 7) }}",
    "replace": "{{ ('x' * 10 ** 6) | replace('x', 'x' * 10 ** 6) }}",
    "indent": "{{ messages | tojson(indent=10 ** 10) }}",
    "batch": "{{ messages | batch(10 ** 10, 'x') | list }}",
    "tabs": "{{ '\t'.expandtabs(2 ** 31 - 1) }}",
}


def render(source: str) -> str:
    return ChatTemplate(source, {}).render(MESSAGES)


def renderers() -> list[psutil.Process]:
    return [
        one
        for one in psutil.Process().children()
        if "fastserve_backend.checkpoints.template_renderer" in one.cmdline()
    ]


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_without_end(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"^the chat template chat_template.jinja {TIME}$"):
        render(LOOPS[name])
    assert render("{{ messages[0].content }}") == "x"


@pytest.mark.parametrize("name", MEMORY_HOGS)
def test_a_template_that_wants_all_memory(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"{MEMORY}|OverflowError|MemoryError|too large"):
        render(MEMORY_HOGS[name])
    assert render("{{ messages[0].content }}") == "x"
    assert all(renderer.memory_info().rss < 1 << 30 for renderer in renderers())


def test_a_prompt_of_too_many_characters() -> None:
    with pytest.raises(ChatTemplateError, match=TOO_LONG):
        render("{% for _ in range(99999) %}{{ 'x' * 999 }}{% endfor %}")


def test_the_largest_prompts_fit() -> None:
    wide = "😀" * (MAX_CHARS // 2)
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": wide}]) == wide


def test_a_template_that_compiles_without_end_is_refused_with_its_checkpoint(
    tmp_path: Path,
) -> None:
    """Jinja computes constants when it compiles a template."""
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 7 ** 1000000000 }}")
    with pytest.raises(ModelError, match=TIME):
        HFTokenizer(tmp_path, VOCAB_SIZE)


def test_a_request_whose_template_exceeds_a_limit_is_an_invalid_one(tmp_path: Path) -> None:
    """Others are answered."""
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content * (10 ** 10 if messages[0].content == 'y' else 1) }}"
    )
    checks = RequestChecks(MODEL, HFTokenizer(tmp_path, VOCAB_SIZE), lambda: 10_000)
    with pytest.raises(InvalidRequestError, match=f"^messages: got '1 messages'; the .*{MEMORY}$"):
        checks.encode_chat([{"role": "user", "content": "y"}])
    assert checks.encode_chat(MESSAGES) == checks.encode("x", special_tokens=False)


def test_a_template_that_takes_long_holds_up_no_other() -> None:
    assert render("first") == "first"
    pids = template_processes().pids()
    with ThreadPoolExecutor(len(pids)) as threads:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            late = [threads.submit(render, "late") for _ in pids]
            wait_for(lambda: not template_processes().pids())
            assert [render("others") for _ in range(3)] == ["others"] * 3
            assert not any(one.done() for one in late)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert [one.result() for one in late] == ["late"] * len(pids)
    assert len(renderers()) <= MAX_PROCESSES


def test_the_process_ends_with_the_one_that_it_serves() -> None:
    program = "from fastserve_backend.checkpoints.template_process import template_processes\n"
    program += "print(*template_processes().pids())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert not psutil.pid_exists(int(done.stdout))
