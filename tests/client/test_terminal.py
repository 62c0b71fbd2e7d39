from __future__ import annotations

import io
import socket
from collections.abc import Iterator

import pytest
from fastserve_client import Chunk
from fastserve_client.terminal import ExitCode, Progress, TextWriter, generate_to_terminal


@pytest.fixture(params=["grpc", "http"])
def unused_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Nobody listens there, nor can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"{request.param}://127.0.0.1:{bound.getsockname()[1]}"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Latin1Terminal(_Terminal):
    encoding = "iso-8859-1"  # type: ignore[assignment]


def test_no_server_is_one_line_with_the_url_and_the_remedy(unused_url: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    code = generate_to_terminal("hello", url=unused_url, out=out, err=err, max_tokens=4)
    assert code == ExitCode.FAILED
    assert out.getvalue() == ""
    assert err.getvalue().count("\n") == 1
    assert f"no server at {unused_url} (Connection refused)" in err.getvalue()
    assert "fastserve serve" in err.getvalue()


def test_a_bad_url_is_the_users_mistake() -> None:
    err = io.StringIO()
    code = generate_to_terminal("hello", url="ftp://127.0.0.1", out=io.StringIO(), err=err)
    assert code == ExitCode.USAGE
    assert err.getvalue().startswith("error: url: got 'ftp://127.0.0.1'")


def test_progress_counts_the_first_chunk_as_prefill() -> None:
    progress = Progress(start_s=10.0)
    progress.add(Chunk("", ()), 10.1)
    progress.add(Chunk("a", (1, 2)), 10.25)
    progress.add(Chunk("b", (3, 4, 5)), 10.5)
    progress.add(Chunk("c", (6,), "stop"), 10.75)
    assert progress.decode_tokens_per_s == pytest.approx(8.0)
    assert progress.summary() == "TTFT 250 ms | 8.0 tokens/s | 6 tokens | finish reason: stop"


def test_one_token_has_no_decode_rate() -> None:
    progress = Progress(start_s=0.0)
    progress.add(Chunk("a", (1,), "length"), 0.5)
    assert progress.summary() == "TTFT 500 ms | 1 token | finish reason: length"


def test_nothing_before_an_interruption() -> None:
    assert Progress(start_s=0.0).summary() == "0 tokens | finish reason: cancelled"


def test_a_terminal_sees_no_control_characters() -> None:
    out = _Terminal()
    TextWriter(out).write("a\x1b[31m\r\x00\x9b\tb\n")
    assert out.getvalue() == "a␛[31m␍␀\N{REPLACEMENT CHARACTER}\tb\n"


def test_a_pipe_sees_the_text_as_it_is() -> None:
    out = io.StringIO()
    TextWriter(out).write("a\x1b[31m")
    assert out.getvalue() == "a\x1b[31m"


def test_a_narrow_terminal_shows_a_question_mark() -> None:
    out = _Latin1Terminal()
    TextWriter(out).write("é語")
    assert out.getvalue() == "é?"


def test_the_closing_line_starts_at_the_left() -> None:
    out = io.StringIO()
    writer = TextWriter(out)
    writer.end_line()
    writer.write("no line feed")
    writer.end_line()
    writer.end_line()
    assert out.getvalue() == "no line feed\n"
