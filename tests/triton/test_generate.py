"""Valid requests over every API, and every output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.grpc.aio as aio_grpcclient
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import FastServeClient, protocol
from running_server import job_held
from serving_client import (
    ANSWER_TIMEOUT_S,
    GENERATE,
    GENERATE_STREAM,
    Answer,
    GrpcStream,
    generate,
    http_stream,
    post,
    tensors,
    wait_until_idle,
)
from tiny_model import engine_options

PROMPT = "Once upon a time"
LONG = 1000  # tokens


def test_grpc_streams_tokens_with_one_final(server: TritonServer) -> None:
    def start() -> GrpcStream:
        stream = GrpcStream(
            server.endpoints.grpc_url,
            text_input=PROMPT,
            stream=True,
            max_tokens=LONG,
            ignore_eos=True,
        )
        stream.first_token()
        return stream

    wait_until_idle(server.endpoints)
    with job_held(server, start) as stream:
        assert len(stream.answer.token_ids) < LONG
    answer = stream.finish()
    assert len(answer.token_ids) == LONG
    assert 1 < answer.num_responses <= LONG
    assert answer.num_finals == 1
    assert answer.error is None
    assert not answer.text.startswith(PROMPT)


async def test_grpc_asyncio_client(endpoints: Endpoints) -> None:
    client = aio_grpcclient.InferenceServerClient(endpoints.grpc_url)
    inputs = tensors(aio_grpcclient, text_input=PROMPT, stream=True, max_tokens=7, ignore_eos=True)

    async def requests():  # type: ignore[no-untyped-def]
        yield {
            "model_name": protocol.MODEL_NAME,
            "inputs": inputs,
            "enable_empty_final_response": True,
        }

    answer = Answer()
    async for result, error in client.stream_infer(requests()):
        assert error is None
        answer.add(result)
    await client.close()
    assert len(answer.token_ids) == 7
    assert answer.num_finals == 1


def test_http_generate_gives_one_response_with_the_prompt(endpoints: Endpoints) -> None:
    body = {"text_input": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    full = post(endpoints.http_url, GENERATE, body).json()
    bare = post(endpoints.http_url, GENERATE, body | {"exclude_input_in_output": True}).json()
    assert full["text_output"] == PROMPT + bare["text_output"]
    assert full["output_ids"] == bare["output_ids"]
    assert len(full["output_ids"]) == 5


def test_http_generate_stream_sends_events(endpoints: Endpoints) -> None:
    body = {"text_input": PROMPT, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    whole = post(endpoints.http_url, GENERATE, body | {"exclude_input_in_output": True}).json()
    with http_stream(endpoints.http_url, body | {"stream": True}) as events:
        text = "".join(event["text_output"] for event in events)
    assert text == whole["text_output"]


def test_generate_with_stream_is_the_servers_error_and_harms_nobody(endpoints: Endpoints) -> None:
    body = {"text_input": PROMPT, "max_tokens": LONG, "stream": True, "ignore_eos": True}
    assert "error" in post(endpoints.http_url, GENERATE, body).json()
    assert post(endpoints.http_url, GENERATE, body | {"stream": False}).status_code == 200


def test_text_equals_the_offline_engine(server: TritonServer, tiny_model: Path) -> None:
    prompts = [PROMPT, "Grüße, 世界", "a" * 300]
    with LLM(**engine_options(tiny_model)) as llm:
        params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=11)
        offline = llm.generate(prompts, params, progress=False)
    streams = [
        GrpcStream(
            server.endpoints.grpc_url,
            text_input=prompt,
            stream=True,
            max_tokens=40,
            temperature=0.8,
            top_p=0.9,
            seed=11,
        )
        for prompt in prompts
    ]
    for stream, completion in zip(streams, offline, strict=True):
        answer = stream.finish()
        assert answer.token_ids == completion.token_ids
        assert answer.text == completion.text


def test_input_ids_are_the_prompt(endpoints: Endpoints) -> None:
    ids = [2, *(byte + 4 for byte in PROMPT.encode())]  # the built-in tokenizer: one id a byte
    by_text = generate(endpoints.grpc_url, text_input=PROMPT, max_tokens=8, temperature=0.0)
    by_ids = generate(endpoints.grpc_url, input_ids=ids, max_tokens=8, temperature=0.0)
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.text == by_text.text
    assert by_ids.text.startswith(PROMPT)


def test_nul_in_a_prompt_is_a_character_like_others(endpoints: Endpoints) -> None:
    answer = generate(endpoints.grpc_url, text_input="a\0b", max_tokens=2, temperature=0.0)
    assert answer.text.startswith("a\0b")


def test_additional_outputs_come_only_on_request(endpoints: Endpoints) -> None:
    plain = generate(endpoints.grpc_url, text_input=PROMPT, max_tokens=3, ignore_eos=True)
    assert plain.outputs == {}
    answer = generate(
        endpoints.grpc_url,
        text_input=PROMPT,
        max_tokens=3,
        ignore_eos=True,
        temperature=0.0,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_cached_tokens=True,
        return_num_output_tokens=True,
        return_cumulative_logprob=True,
        return_logprobs=True,
        return_perf_metrics=True,
        sampling_parameters=json.dumps({"logprobs": 2}),
    )
    outputs = answer.outputs
    assert outputs[protocol.FINISH_REASON] == b"length"
    assert outputs[protocol.NUM_INPUT_TOKENS] == len(PROMPT) + 1
    assert outputs[protocol.NUM_CACHED_TOKENS] == 16  # those of `plain` in full blocks
    assert outputs[protocol.NUM_OUTPUT_TOKENS] == 3
    logprobs = json.loads(outputs[protocol.LOGPROBS_OUTPUT])
    assert [entry["token_id"] for entry in logprobs] == answer.token_ids
    for entry in logprobs:
        assert [set(top) for top in entry["top"]] == [{"token_id", "token", "logprob"}] * 2
        assert entry["top"][0]["token_id"] == entry["token_id"]  # greedy
        assert entry["logprob"] == pytest.approx(entry["top"][0]["logprob"], abs=1e-4)
    total = sum(entry["logprob"] for entry in logprobs)
    assert outputs[protocol.CUMULATIVE_LOGPROB] == pytest.approx(total, abs=1e-3)
    times = [int(outputs[spec.name]) for spec in protocol.PERF_OUTPUTS[:4]]
    assert times == sorted(times)
    assert times[0] > 0
    assert outputs[protocol.NUM_PREEMPTIONS] >= 0
    assert outputs[protocol.NUM_SWAPS] == 0
    assert outputs[protocol.QUEUE_LEVEL] >= 0


def test_fields_of_a_body_that_are_no_tensors(endpoints: Endpoints) -> None:
    def answer(**fields: object) -> dict[str, str]:
        body = {"text_input": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        fields |= {"exclude_input_in_output": True}
        answered: dict[str, str] = post(endpoints.http_url, GENERATE, body | fields).json()
        return answered

    with_logprobs = answer(return_logprobs=True, logprobs=2)
    assert [len(token["top"]) for token in json.loads(with_logprobs["logprobs"])] == [2] * 8
    text = with_logprobs["text_output"]
    last = text[-1]
    stopped = text[: text.index(last)]
    assert answer(stop=last)["text_output"] == stopped
    assert answer(stop=last, max_tokens=10**6, clip_max_tokens=True)["text_output"] == stopped


def test_streamed_outputs_add_up(endpoints: Endpoints) -> None:
    stream = GrpcStream(
        endpoints.grpc_url,
        text_input=PROMPT,
        stream=True,
        max_tokens=30,
        ignore_eos=True,
        return_num_output_tokens=True,
        return_logprobs=True,
        return_cumulative_logprob=True,
        return_finish_reason=True,
        return_perf_metrics=True,
    )
    tokens, logprobs, reasons = 0, [], []
    while not stream.answer.num_finals:
        stream.step()
        outputs = stream.answer.outputs
        tokens += int(outputs[protocol.NUM_OUTPUT_TOKENS])
        logprobs += json.loads(outputs[protocol.LOGPROBS_OUTPUT])
        reasons.append(outputs.get(protocol.FINISH_REASON))
        has_times = protocol.ARRIVAL_TIME_NS in outputs
        assert has_times == bool(stream.answer.num_finals)
    answer = stream.finish()
    assert tokens == len(answer.token_ids) == 30
    assert [entry["token_id"] for entry in logprobs] == answer.token_ids
    assert "top" not in logprobs[0]
    assert reasons == [None] * (len(reasons) - 1) + [b"length"]
    total = sum(entry["logprob"] for entry in logprobs)
    assert answer.outputs[protocol.CUMULATIVE_LOGPROB] == pytest.approx(total, abs=1e-3)


def test_tensor_beats_sampling_parameters_beats_request_parameter(endpoints: Endpoints) -> None:
    def length(**request: object) -> int:
        answer = generate(endpoints.grpc_url, text_input=PROMPT, **request)
        assert answer.error is None, answer.error
        return len(answer.token_ids)

    everywhere = {"ignore_eos": True}
    in_object = json.dumps({"max_tokens": 6, "ignore_eos": True})
    by_parameter = {"max_tokens": 7}
    assert length(**everywhere) == SamplingParams().max_tokens
    assert length(**everywhere, parameters=by_parameter) == 7
    assert length(sampling_parameters=in_object, parameters=by_parameter) == 6
    assert length(max_tokens=5, sampling_parameters=in_object, parameters=by_parameter) == 5


def test_numbers_and_booleans_may_be_strings(endpoints: Endpoints) -> None:
    values = {"max_tokens": "4", "temperature": "0", "top_p": "0.5", "ignore_eos": "true"}
    in_object = generate(
        endpoints.grpc_url, text_input=PROMPT, sampling_parameters=json.dumps(values)
    )
    as_parameters = generate(endpoints.grpc_url, text_input=PROMPT, parameters=values)
    assert in_object.error is None
    assert len(in_object.token_ids) == 4
    assert as_parameters.token_ids == in_object.token_ids


def test_stop_words_end_the_text_before_them(endpoints: Endpoints) -> None:
    request = {"text_input": PROMPT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    flags = {"exclude_input_in_output": True, "return_finish_reason": True}
    whole = generate(endpoints.grpc_url, **request, **flags)
    word = whole.text[len(whole.text) // 2 :][:4]
    expected = whole.text[: whole.text.index(word)]
    by_tensor = generate(endpoints.grpc_url, **request, **flags, stop_words=["no such", word])
    by_object = generate(
        endpoints.grpc_url, **request, **flags, sampling_parameters=json.dumps({"stop": [word]})
    )
    streamed = generate(
        endpoints.grpc_url, **request, stream=True, return_finish_reason=True, stop_words=[word]
    )
    for answer in (by_tensor, by_object, streamed):
        assert answer.text == expected
        assert answer.outputs[protocol.FINISH_REASON] == b"stop"
        assert answer.num_finals == 1


def test_same_seed_same_text_whatever_else_runs(endpoints: Endpoints) -> None:
    request = {"text_input": PROMPT, "max_tokens": 24, "seed": 2**64 - 1, "stream": True}
    alone = generate(endpoints.grpc_url, **request)
    others = [
        GrpcStream(endpoints.grpc_url, text_input=f"other {n}", max_tokens=50, stream=True)
        for n in range(6)
    ]
    among_others = generate(endpoints.grpc_url, **request)
    for other in others:
        other.finish()
    assert among_others.token_ids == alone.token_ids


def test_config_declares_what_the_protocol_says(endpoints: Endpoints) -> None:
    url = f"{endpoints.http_url}/v2/models/{protocol.MODEL_NAME}"
    metadata = httpx2.get(url, timeout=ANSWER_TIMEOUT_S).json()
    for specs, declared in (
        (protocol.INPUTS, metadata["inputs"]),
        (protocol.OUTPUTS, metadata["outputs"]),
    ):
        assert declared == [
            {
                "name": spec.name,
                "datatype": spec.datatype,
                "shape": [-1 if spec.variable_length else 1],
            }
            for spec in specs
        ]


def test_many_streams_at_once_each_end_once(endpoints: Endpoints) -> None:
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(1, 60, 40)]
    streams = [
        GrpcStream(
            endpoints.grpc_url,
            text_input=f"prompt {n}",
            stream=True,
            max_tokens=length,
            ignore_eos=True,
        )
        for n, length in enumerate(lengths)
    ]
    for stream, length in zip(streams, lengths, strict=True):
        answer = stream.finish()
        assert len(answer.token_ids) == length
        assert answer.num_finals == 1


def test_an_http_error_of_a_stream_is_an_event(endpoints: Endpoints) -> None:
    body = {"text_input": PROMPT, "max_tokens": -1, "stream": True}
    response = post(endpoints.http_url, GENERATE_STREAM, body)
    assert response.status_code == 400
    assert "max_tokens" in response.text


A = 4 + ord("a")
BASE = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("given", [A, [A], [1023, A], str(A), f"[{A}, 1023]", f"\ufeff[{A}]"])
def test_stop_tokens_by_every_way(given: Any, endpoints: Endpoints, url: str) -> None:
    """Without stop tokens the answer would be the letter a for ever."""
    bias = {"logit_bias": json.dumps({A: 100})}
    stop = {"stop_token_ids": given}
    answers = [
        generate(
            endpoints.grpc_url,
            text_input=PROMPT,
            sampling_parameters=json.dumps(BASE | bias | stop),
        )
    ]
    if not isinstance(given, list):  # which tritonserver accepts for tensors alone
        answers.append(
            generate(endpoints.grpc_url, text_input=PROMPT, parameters=bias | stop, **BASE)
        )
        body = {"text_input": PROMPT, **BASE, **bias, **stop}
        assert post(endpoints.http_url, GENERATE, body).json()["text_output"] == PROMPT
    for answer in answers:
        assert (answer.text, answer.token_ids) == (PROMPT, [A])
    with FastServeClient(url) as client:
        whole = client.generate(PROMPT, logit_bias={A: 100}, **stop, **BASE)
    assert (whole.text, list(whole.token_ids), whole.finish_reason) == ("", [A], "stop")


@pytest.mark.parametrize("stop", ["</s>", "</s></s>", "</s></s></s>"])
def test_stop_words_of_special_tokens_by_every_way(
    stop: str, endpoints: Endpoints, url: str
) -> None:
    """Without stop words the answer would be the end token for ever. A single text is one stop
    word."""
    bias = {"logit_bias": json.dumps({2: 100})}
    expected = [2] * stop.count("</s>")
    grpc = endpoints.grpc_url
    as_tensor = generate(grpc, text_input=PROMPT, stop_words=[stop], parameters=bias, **BASE)
    as_text = generate(grpc, text_input=PROMPT, parameters=bias | {"stop": stop}, **BASE)
    in_object = json.dumps(BASE | bias | {"stop": stop, "stop_words": []})
    of_object = generate(grpc, text_input=PROMPT, sampling_parameters=in_object)
    for answer in (as_tensor, as_text, of_object):
        assert (answer.text, answer.token_ids) == (PROMPT, expected)
    for name in ("stop", "stop_words"):
        body = {"text_input": PROMPT, **BASE, **bias, name: stop}
        over_http = post(endpoints.http_url, GENERATE, body).json()
        assert over_http["text_output"] == PROMPT
    for words in (stop, [stop, "never"], (stop,)):
        with FastServeClient(url) as client:
            whole = client.generate(PROMPT, logit_bias={2: 100}, stop=words, **BASE)
        assert (whole.text, list(whole.token_ids), whole.finish_reason) == ("", expected, "stop")
