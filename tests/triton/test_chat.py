"""Conversations with the embedded model through the real server, and ``fastserve chat``."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import FastServeClient, InvalidRequest, RequestOptions
from fastserve_client.terminal import ExitCode
from running_server import job_held
from serving_client import (
    GENERATE,
    GENERATE_STREAM,
    ended_jobs,
    http_stream,
    metric,
    post,
    wait_until_idle,
)
from waiting import wait_for

DEADLINE_S = 300.0  # of commands with several long answers
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

CAPITAL = "What is the capital of France? Answer in one word."
PARIS = "The capital of France is Paris."
LONG_STORY = "Tell a very long story about a lighthouse."
_HINT = "Ctrl-D ends"
# The command at a time of which the model is known to say parts.
AT_TEN_TO_TEN = """
from datetime import datetime
from fastserve_backend.__main__ import main
from fastserve_chat import demo_tools

class Stopped(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 27, 21, 50)

demo_tools.datetime = Stopped
main()
"""


@pytest.fixture
def client(chat_endpoints: Endpoints) -> Iterator[FastServeClient]:
    with FastServeClient(chat_endpoints.grpc_url) as client:
        yield client


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_messages_become_the_models_own_prompt(client: FastServeClient) -> None:
    answer = client.generate([user(CAPITAL)], max_tokens=30, temperature=0)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{CAPITAL}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert client.generate(prompt, max_tokens=30, temperature=0) == answer


def test_earlier_turns_and_the_system_message_count(client: FastServeClient) -> None:
    turns = [user(CAPITAL), assistant("The capital of France is Paris."), user("And of Italy?")]
    answer = client.generate(turns, max_tokens=24, temperature=0)
    assert "Rome" in answer.text
    told = [{"role": "system", "content": "You are a cat."}, *turns]
    other = client.generate(told, max_tokens=24, temperature=0)
    assert other.num_input_tokens != answer.num_input_tokens


def test_over_http_with_and_without_stream(chat_endpoints: Endpoints) -> None:
    body = {"messages": json.dumps([user(CAPITAL)]), "max_tokens": 30, "temperature": 0}
    whole = post(chat_endpoints.http_url, GENERATE, body)
    assert whole.json()["text_output"] == "The capital of France is Paris."
    with http_stream(chat_endpoints.http_url, {**body, "stream": True}) as events:
        assert "".join(event["text_output"] for event in events) == whole.json()["text_output"]
    assert post(chat_endpoints.http_url, GENERATE_STREAM, {"messages": "[]"}).status_code == 400


def test_parts_of_text_are_joined(chat_endpoints: Endpoints, client: FastServeClient) -> None:
    parts = [{"type": "text", "text": CAPITAL[:9]}, {"type": "text", "text": CAPITAL[9:]}]
    messages = [{"role": "user", "content": parts}]
    assert client.generate(messages, max_tokens=30, temperature=0).text == PARIS
    body = {"messages": "\ufeff" + json.dumps(messages), "max_tokens": 30, "temperature": 0}
    assert post(chat_endpoints.http_url, GENERATE, body).json()["text_output"] == PARIS
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    silent = {"role": "assistant", "content": "", "name": None}
    one, other = (
        client.generate([user("Hi"), answer, user(CAPITAL)], max_tokens=5, temperature=0)
        for answer in (called, silent)
    )
    assert one == other  # the template of this model knows no tools
    with pytest.raises(
        InvalidRequest, match=r"messages\[0\].content: got 'NoneType'; must be text"
    ):
        client.generate([{"role": "user", "content": None}])
    with pytest.raises(InvalidRequest, match="messages: got one message; must be a list"):
        client.generate(user(CAPITAL))  # type: ignore[arg-type]


def test_an_answer_goes_on_with_the_last_message(client: FastServeClient) -> None:
    begun = [user(CAPITAL), assistant("The capital of")]
    answer = client.generate(begun, continue_final_message=True, max_tokens=20, temperature=0)
    assert "The capital of" + answer.text == PARIS
    whole = client.generate([user(CAPITAL)], add_generation_prompt=False, max_tokens=1)
    asked = client.generate([user(CAPITAL)], max_tokens=1)
    assert whole.num_input_tokens is not None
    assert whole.num_input_tokens < (asked.num_input_tokens or 0)


def test_what_a_template_does_not_know_changes_nothing(client: FastServeClient) -> None:
    plain = client.generate([user(CAPITAL)], max_tokens=9, temperature=0)
    tools = [{"type": "function", "function": {"name": "add"}}]
    options: RequestOptions = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    assert client.generate([user(CAPITAL)], max_tokens=9, temperature=0, **options) == plain
    history = [
        {"role": "user", "name": "ann", "content": CAPITAL},
        {"role": "assistant", "content": "P", "reasoning_content": "R", "reasoning": "R"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Paris"}]},
    ]
    assert client.generate(history, max_tokens=3).finish_reason is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{}] * 1025}, "tools: got '1025 tools'; at most 1024"),
        ({"tools": [5]}, r"tools\[0\]: got 'int'; must be an object"),
        ({"tools": "{}"}, "tools: got '{}'; must be a JSON list"),
        ({"tools": [{"a": "a" * 2**19}]}, "tools: got '524299 characters'; at most 524288"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: got 'messages'; no"),
        ({"chat_template_kwargs": [5]}, r"chat_template_kwargs: got \[5\]; must be a JSON object"),
        ({"add_generation_prompt": "x"}, "add_generation_prompt: got 'x'; must be true or false"),
        ({"continue_final_message": True}, "messages: got 'user'; the last message must be the"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message: got True; must be false with add_generation_prompt",
        ),
    ],
)
def test_bad_template_options_are_named(
    options: Any, message: str, client: FastServeClient
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        client.generate([user("Hi")], **options)


def test_template_options_belong_to_messages(
    chat_endpoints: Endpoints, client: FastServeClient
) -> None:
    with pytest.raises(InvalidRequest, match=r"^tools: got 'a value'; only with messages"):
        client.generate("Hi", tools=[])
    body = {"messages": json.dumps([user(CAPITAL)]), "max_tokens": 30, "temperature": 0}
    body |= {"tools": '[{"type": "function"}]', "chat_template_kwargs": '{"a": 1}'}
    assert post(chat_endpoints.http_url, GENERATE, body).json()["text_output"] == PARIS


def test_emoji_of_several_tokens_are_streamed_whole(client: FastServeClient) -> None:
    chunks = client.stream("🎉🚀🎉🚀🎉🚀🎉🚀🎉🚀", max_tokens=40, temperature=0)
    text = "".join(chunk.text for chunk in chunks)
    assert "🎉🚀🎉🚀" in text
    assert "\ufffd" not in text[:-1]  # max_tokens may cut the last one


def test_a_conversation_that_is_too_long_is_refused(client: FastServeClient) -> None:
    with pytest.raises(InvalidRequest, match="so a prompt has at most 2047"):
        client.generate([user("many words " * 1500)])


# --- fastserve chat -----------------------------------------------------------------------------


def chat_command(endpoints: Endpoints, *flags: str) -> list[str]:
    url = ["--url", endpoints.grpc_url]
    return [sys.executable, "-m", "fastserve_backend", "chat", *url, "--temperature", "0", *flags]


def chat_through_pipes(
    endpoints: Endpoints, text: str, max_tokens: int
) -> subprocess.CompletedProcess[str]:
    return through_pipes(chat_command(endpoints, "--max-tokens", str(max_tokens)), text)


def through_pipes(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=DEADLINE_S)


class Terminal:
    """Runs ``fastserve chat`` on a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self.process = process
        self._screen = screen
        self._unread = ""

    def type(self, line: str) -> None:
        """Types a line, and returns when it has appeared, so that later reads begin after it."""
        os.write(self._screen, line.encode() + b"\n")
        self.read_to(line)

    def interrupt_prompt(self) -> None:
        """Sends Ctrl-C until there is an answer: CPython delays one that comes between the prompt
        and the wait for a key until the next key."""
        deadline = time.monotonic() + DEADLINE_S
        while _HINT not in self._unread:
            assert time.monotonic() < deadline, self._unread
            self.process.send_signal(signal.SIGINT)
            while _HINT not in self._unread and self._reads_more(5.0):
                pass
        self.read_to(_HINT)

    def end_of_input(self) -> None:
        os.write(self._screen, b"\x04")  # Ctrl-D

    def read_to(self, text: str) -> str:
        """Reads output up to and including ``text``."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self._unread:
            left_s = deadline - time.monotonic()
            assert left_s > 0, self._unread
            self._reads_more(left_s)
        seen, self._unread = self._unread.split(text, 1)
        return seen

    def _reads_more(self, timeout_s: float) -> bool:
        if not select.select([self._screen], [], [], timeout_s)[0]:
            return False
        self._unread += os.read(self._screen, 4096).decode(errors="replace")
        return True


@contextmanager
def terminal(command: list[str]) -> Iterator[Terminal]:
    screen, keyboard = pty.openpty()
    environment = os.environ | {"TERM": "dumb"}
    with subprocess.Popen(
        command, stdin=keyboard, stdout=keyboard, stderr=keyboard, env=environment
    ) as process:
        os.close(keyboard)
        try:
            yield Terminal(process, screen)
        finally:
            process.kill()
            os.close(screen)


def test_the_embedded_model_calls_the_demos_tools(chat_endpoints: Endpoints) -> None:
    text = f"What is 12 * 34?\nWhat time is it?\n{CAPITAL}\n"
    interpreter, _, _, *arguments = chat_command(
        chat_endpoints, "--max-tokens", "40", "--tools", "demo"
    )
    done = through_pipes([interpreter, "-c", AT_TEN_TO_TEN, *arguments], text)
    product, clock, capital = done.stdout.splitlines()
    assert "408" in product
    assert "Paris" in capital
    calls = done.stderr.splitlines()
    assert calls[0] == "[calculator: 12 * 34 = 408]"
    assert calls[1] == "[clock: 21:50, Friday, 27 November 2026]"
    assert any(part in clock for part in ("21:50", "Friday", "27 November 2026"))
    assert len(calls) == 2
    assert done.returncode == 0


def test_chat_remembers_and_ctrl_c_stops_only_the_answer(
    chat_server: TritonServer, client: FastServeClient
) -> None:
    chat_endpoints = chat_server.endpoints
    with terminal(chat_command(chat_endpoints, "--max-tokens", "1500")) as chat:
        chat.read_to("> ")
        chat.type(CAPITAL)
        chat.read_to("Paris.")
        chat.read_to("> ")
        chat.type("And of Italy?")
        chat.read_to("Rome")

        def start_story() -> None:
            chat.read_to("> ")
            chat.type(LONG_STORY)
            chat.read_to("lighthouse")

        url = chat_endpoints.metrics_url
        wait_until_idle(chat_endpoints)
        cancelled = ended_jobs(url, "cancelled")
        with job_held(chat_server, start_story):
            chat.process.send_signal(signal.SIGINT)
            chat.read_to("(stopped)")
        wait_for(lambda: ended_jobs(url, "cancelled") == cancelled + 1)
        chat.read_to("> ")
        chat.interrupt_prompt()  # nothing to stop: it prints a hint and continues
        chat.read_to("> ")

        chat.type("/clear")
        chat.read_to("> ")
        chat.type("And of Italy?")
        forgotten = chat.read_to("> ")
        alone = client.generate([user("And of Italy?")], max_tokens=1500, temperature=0)
        assert alone.text.split()[:8] == forgotten.split()[:8]

        chat.end_of_input()
        assert chat.process.wait(DEADLINE_S) == ExitCode.OK
    wait_until_idle(chat_endpoints)
    assert metric(url, "fastserve_jobs", state="running") == 0


def test_chat_takes_messages_from_a_pipe(chat_endpoints: Endpoints) -> None:
    done = chat_through_pipes(chat_endpoints, f"{CAPITAL}\n\nAnd of Italy?\n", max_tokens=24)
    assert done.returncode == ExitCode.OK
    first, second = done.stdout.splitlines()[:2]
    assert first == "The capital of France is Paris."
    assert "Rome" in second
    assert ">" not in done.stdout


def test_a_message_that_is_refused_is_not_kept(chat_endpoints: Endpoints) -> None:
    done = chat_through_pipes(chat_endpoints, f"{'many words ' * 1500}\n{CAPITAL}\n", max_tokens=24)
    assert done.stderr.startswith("error: messages: got")
    assert done.stdout == "The capital of France is Paris.\n"
    assert done.returncode == ExitCode.OK


def test_answers_are_as_long_as_the_conversation_leaves_room_for(chat_endpoints: Endpoints) -> None:
    nearly_all = "many words " * 1000  # of the 2048 tokens
    done = chat_through_pipes(
        chat_endpoints,
        f"{CAPITAL}\n/clear\n{nearly_all}\n{CAPITAL}\n/clear\n{CAPITAL}\n",
        max_tokens=2048,
    )
    answers, notes = done.stdout.splitlines(), done.stderr.splitlines()
    assert answers[0] == answers[-1] == "The capital of France is Paris."
    assert notes[0].startswith("(cut off where the model takes no more; /clear ")
    assert ": got " in notes[1]
    assert notes[2:] == ["/clear forgets the conversation, which is sent with each message."]
    assert done.returncode == ExitCode.OK


def test_chat_that_cannot_write_says_so(chat_endpoints: Endpoints) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            chat_command(chat_endpoints, "--max-tokens", "24"),
            input=CAPITAL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
        )
    assert done.returncode == ExitCode.FAILED
    assert done.stderr == "error: cannot write the text: No space left on device\n"


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("grpc://127.0.0.1:9", ExitCode.FAILED, "127.0.0.1:9"),
        ("carrier-pigeon://here", ExitCode.USAGE, "url: got 'carrier-pigeon://here'"),
    ],
)
def test_chat_without_a_server_says_so(url: str, code: ExitCode, message: str) -> None:
    command = [sys.executable, "-m", "fastserve_backend", "chat"]
    done = subprocess.run(
        [*command, "--url", url],
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == code
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
