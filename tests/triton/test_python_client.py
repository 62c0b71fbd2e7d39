"""``fastserve_client`` and ``fastserve generate`` against the running server, by gRPC and HTTP."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import (
    Completion,
    FastServeClient,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerUnavailable,
    TokenStream,
)
from fastserve_client.terminal import ExitCode, generate_to_terminal
from running_server import job_held, rank_stopped
from waiting import DEADLINE_S

LONG = 3000  # tokens


@pytest.fixture
def client(url: str) -> Iterator[FastServeClient]:
    with FastServeClient(url) as client:
        yield client


def test_a_stream_and_a_single_response_agree(client: FastServeClient) -> None:
    chunks = list(client.stream("Hello", max_tokens=12, temperature=0, ignore_eos=True))
    streamed = Completion.from_chunks(chunks)
    whole = client.generate("Hello", max_tokens=12, temperature=0, ignore_eos=True)
    assert streamed == whole
    assert whole.num_output_tokens == 12
    assert whole.finish_reason == "length"
    assert whole.num_input_tokens is not None
    assert not whole.text.startswith("Hello")
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_token_ids_instead_of_text(client: FastServeClient) -> None:
    completion = client.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
    assert completion.num_input_tokens == 3
    assert completion.num_output_tokens == 3


def test_an_answer_goes_on_after_the_output_so_far(client: FastServeClient) -> None:
    wanted = {"max_tokens": 24, "seed": 3, "ignore_eos": True, "presence_penalty": 0.5}
    chunks = list(client.stream("Hello", **wanted))
    whole = Completion.from_chunks(chunks)
    for so_far in (chunks[:1], chunks[:9]):
        begun = Completion.from_chunks(so_far)
        given = list(begun.token_ids)
        rest = client.generate("Hello", output_ids_so_far=given, **wanted)
        assert begun.token_ids + rest.token_ids == whole.token_ids
        assert begun.text + rest.text == whole.text
        assert rest.num_input_tokens == whole.num_input_tokens
        assert rest.finish_reason == "length"
    with pytest.raises(InvalidRequest, match=r"^output_ids_so_far: got '24 tokens'; must be fewer"):
        client.generate("Hello", output_ids_so_far=whole.token_ids, **wanted)


def test_logprobs_and_perf_metrics(client: FastServeClient) -> None:
    before_ns = time.time_ns()
    completion = client.generate(
        "Hello", max_tokens=4, temperature=0, ignore_eos=True, logprobs=2, perf_metrics=True
    )
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    assert all(len(entry.top) == 2 for entry in completion.logprobs)
    assert completion.logprobs[0].top[0].token_id == completion.token_ids[0]  # greedy
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry.logprob for entry in completion.logprobs), abs=1e-3
    )
    perf = completion.perf
    assert perf is not None
    assert before_ns - 10**9 < perf.arrival_time_ns <= perf.first_scheduled_time_ns
    assert perf.first_scheduled_time_ns < perf.first_token_time_ns < perf.last_token_time_ns


def test_log_probabilities_of_the_prompt(client: FastServeClient) -> None:
    asked = {"max_tokens": 3, "ignore_eos": True, "prompt_logprobs": 1}
    whole = client.generate("Hé", return_prompt_tokens=True, **asked)
    assert [token.special for token in whole.prompt_tokens] == ["</s>", None, None, None]
    assert b"".join(token.utf8 for token in whole.prompt_tokens) == "Hé".encode()
    first, *others = whole.prompt_logprobs
    assert first is None
    for token, entry in zip(whole.prompt_tokens[1:], others, strict=True):
        assert entry is not None
        assert (entry.token_id, entry.token, entry.part) == (
            token.token_id,
            token.token,
            token.part,
        )
        assert (entry.rank == 1) == (entry.top[0].token_id == entry.token_id)
    first_chunk, *later = client.stream("Hé", **asked)
    assert first_chunk.prompt_logprobs == whole.prompt_logprobs
    assert not any(chunk.prompt_logprobs for chunk in later)
    assert not any(chunk.prompt_tokens for chunk in (first_chunk, *later))


def test_the_same_seed_gives_the_same_text(client: FastServeClient) -> None:
    first, second = (client.generate("Hello", max_tokens=16, seed=2**64 - 1) for _ in range(2))
    assert first == second


def test_what_the_server_refuses_names_field_and_value(client: FastServeClient) -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature: got -1"):
        list(client.stream("Hello", temperature=-1))
    with pytest.raises(InvalidRequest, match=r"^max_tokens: got 1000000"):
        client.generate("Hello", max_tokens=1_000_000)
    with pytest.raises(InvalidRequest, match=r"^priority: got 101; must be an integer, -100 "):
        client.generate("Hello", priority=101)
    with pytest.raises(InvalidRequest, match=r"^ttft_slo_ms: got -1\.0; must be a number of milli"):
        client.generate("Hello", ttft_slo_ms=-1)


def test_another_model_is_not_there(url: str) -> None:
    with FastServeClient(url, model="nosuch") as client:
        assert not client.is_ready()
        with pytest.raises(ServerUnavailable, match="nosuch"):
            client.generate("Hello")


def test_both_transports_bring_the_same(client: FastServeClient, endpoints: Endpoints) -> None:
    options = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    with FastServeClient(endpoints.grpc_url) as other:
        for prompt in ('Grüße, 世界\n\0"🎉', list(range(4, 40))):
            first, second = (one.generate(prompt, **options) for one in (client, other))
            assert second.num_input_tokens is not None
            assert second.num_cached_tokens == (second.num_input_tokens - 1) // 16 * 16
            assert first == second


def test_characters_of_several_tokens_come_whole(client: FastServeClient) -> None:
    # The tokenizer has a token for each byte, and this seed draws many different ones.
    chunks = list(client.stream("Hello", max_tokens=400, seed=3, top_k=-1, ignore_eos=True))
    whole = client.generate("Hello", max_tokens=400, seed=3, top_k=-1, ignore_eos=True)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert any(character > "\x7f" and character != "\ufffd" for character in whole.text)


def test_stop_words(client: FastServeClient) -> None:
    options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = client.generate("Hello", **options)
    word = whole.text[len(whole.text) // 2 :][:4]
    stopped = client.generate("Hello", stop=["no such", word], **options)
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(word)]


def test_a_request_may_have_an_id(client: FastServeClient) -> None:
    assert client.generate("Hello", max_tokens=1, request_id="mine-1").num_output_tokens == 1


def begun(client: FastServeClient) -> TokenStream:
    """A long stream whose first chunk is read."""
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    next(chunks)
    return chunks


def test_leaving_the_block_frees_the_job(
    client: FastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    with job_held(server, lambda: begun(client)) as chunks:
        with chunks:
            pass
        assert list(chunks) == []
    wait_until_cancelled()


@pytest.mark.parametrize("client_too", [False, True])
def test_dropping_the_iterator_frees_the_job(
    client: FastServeClient,
    server: TritonServer,
    url: str,
    client_too: bool,
    wait_until_cancelled: Callable[[], None],
) -> None:
    kept: list[object] = []

    def start() -> None:
        # A client that nothing else refers to lives as long as its streams.
        kept[:] = [begun(FastServeClient(url) if client_too else client)]

    with job_held(server, start):
        kept.clear()
        gc.collect()
    wait_until_cancelled()


def test_closing_one_stream_leaves_the_others_alone(
    client: FastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    with job_held(server, lambda: begun(client)) as doomed:
        other = client.stream("Hello", max_tokens=40, ignore_eos=True)
        doomed.close()
        assert list(doomed) == []
    assert Completion.from_chunks(other).num_output_tokens == 40
    wait_until_cancelled()


def test_closing_from_another_thread_ends_a_blocked_iteration(
    client: FastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    with job_held(server, lambda: begun(client)) as chunks:
        consumer = threading.Thread(target=lambda: list(chunks), daemon=True)
        consumer.start()
        chunks.close()
        consumer.join(DEADLINE_S)
        assert not consumer.is_alive()
    wait_until_cancelled()


def test_closing_the_client_ends_its_streams(
    client: FastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    with job_held(server, lambda: begun(client)) as chunks:
        client.close()
        client.close()
        with pytest.raises(RequestCancelled):
            list(chunks)
        with pytest.raises(RequestCancelled, match="the client is closed"):
            client.stream("Hello")
        assert not client.is_ready()
    wait_until_cancelled()


def times_out_after_a_token(
    client: FastServeClient, server: TritonServer, timeout_s: float
) -> bool:
    """False: time was up before the first token, or the job ended before its rank was stopped."""
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True, timeout_s=timeout_s)
    try:
        assert next(chunks).token_ids
    except RequestTimeout:
        return False
    with rank_stopped(server.runtime):
        try:
            list(chunks)
        except RequestTimeout as error:
            return "did not finish in time" in str(error) and list(chunks) == []
    return False


def test_a_timeout_is_of_the_whole_request(
    client: FastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    # The rank stands still for less time than after which it counts as dead.
    timeouts_s = (0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)
    assert any(times_out_after_a_token(client, server, timeout_s) for timeout_s in timeouts_s)
    with rank_stopped(server.runtime), pytest.raises(RequestTimeout):
        client.generate("Hello", max_tokens=LONG, ignore_eos=True, timeout_s=0.2)
    wait_until_cancelled()


def test_many_streams_at_once(client: FastServeClient) -> None:
    expected = client.generate("Hello", max_tokens=20, temperature=0, ignore_eos=True)
    results: list[Completion] = []

    def consume() -> None:
        chunks = client.stream("Hello", max_tokens=20, temperature=0, ignore_eos=True)
        results.append(Completion.from_chunks(chunks))

    threads = [threading.Thread(target=consume, daemon=True) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert results == [expected] * 64


def test_generate_streams_text_and_a_closing_line(url: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    code = generate_to_terminal("Hello", url=url, out=out, err=err, max_tokens=8, ignore_eos=True)
    assert code == ExitCode.OK
    assert out.getvalue().endswith("\n")
    # A busy server may send all tokens together, and then there is no rate.
    ttft, *rates, tokens, reason = err.getvalue().strip().split(" | ")
    assert ttft.startswith("TTFT ")
    assert ttft.endswith(" ms")
    assert len(rates) <= 1
    assert all(rate.endswith(" tokens/s") for rate in rates)
    assert (tokens, reason) == ("8 tokens", "finish reason: length")


def test_generate_shows_a_refusal_in_one_line(url: str) -> None:
    err = io.StringIO()
    code = generate_to_terminal("Hello", url=url, out=io.StringIO(), err=err, top_p=2.0)
    assert code == ExitCode.USAGE
    assert err.getvalue().startswith("error: top_p: got 2.0; ")
    assert err.getvalue().count("\n") == 1


def test_a_full_disk_ends_generate_in_one_line(url: str) -> None:
    err = io.StringIO()
    with open("/dev/full", "w") as out:
        # Many tokens, as only one in four has a text, and only writing a text fails.
        options = {"max_tokens": 200, "ignore_eos": True}
        code = generate_to_terminal("Hello", url=url, out=out, err=err, **options)
    assert code == ExitCode.FAILED
    assert err.getvalue() == "error: cannot write the text: No space left on device\n"


def _generate_process(url: str) -> subprocess.Popen[bytes]:
    """Returns when it has printed a character of a long answer."""
    script = (
        "import sys; from fastserve_client.terminal import generate_to_terminal; "
        f"sys.exit(generate_to_terminal('Hello', url={url!r}, "
        f"max_tokens={LONG}, ignore_eos=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    return process


def test_ctrl_c_ends_generate_with_its_closing_line(
    url: str, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    with (
        ExitStack() as stack,
        job_held(server, lambda: stack.enter_context(_generate_process(url))) as process,
    ):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == ExitCode.INTERRUPTED
    assert err.decode().endswith("finish reason: cancelled\n")
    assert "Traceback" not in err.decode()
    wait_until_cancelled()


def test_a_reader_that_goes_away_ends_generate_quietly(
    url: str, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    with ExitStack() as stack:
        with job_held(server, lambda: stack.enter_context(_generate_process(url))) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
        # Texts of later tokens do not reach a reader.
        assert process.wait(DEADLINE_S) == ExitCode.BROKEN_PIPE
        assert process.stderr.read() == b""
    wait_until_cancelled()
