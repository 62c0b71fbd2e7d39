from __future__ import annotations

import json
import math
from array import array
from collections import Counter

import numpy as np
import pytest
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer
from fastserve_backend.job import JobOutput
from fastserve_backend.logprobs import PromptLogprobs, TokenLogprob
from fastserve_backend.rank_protocol.messages import PromptScores
from fastserve_backend.serving.codec import decode_request
from fastserve_backend.serving.responses import ResponseEncoder, WallClock
from fastserve_backend.system.clock import MonotonicClock

TOKENS = {2: b"", 7: " é".encode(), 8: "é".encode()[:1]}


class FewTokens(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id]


TOKENIZER = FewTokens(300)


def test_what_the_first_response_says_about_the_prompt() -> None:
    tensors = {
        "input_ids": np.array([2, 7, 8], np.int32),
        "return_prompt_logprobs": np.array([True]),
        "return_prompt_tokens": np.array([True]),
    }
    request = decode_request(tensors, '{"prompt_logprobs": 1}')
    assert request.params.prompt_logprobs == 1
    prompt_ids = array("i", [2, 7, 8])
    known = PromptLogprobs(prompt_ids, 1)
    for logprob, rank, top in ((-2.0, 3, 8), (-0.5, 1, 8)):
        rest = (np.array([one], np.int32).tobytes() for one in (rank, top))
        known.on_scores(PromptScores(np.float32(logprob).tobytes(), *rest, bytes(4)))
    encoder = ResponseEncoder(request, "", prompt_ids, WallClock(MonotonicClock()), TOKENIZER)
    outputs = dict(encoder.encode([JobOutput("a", (7,), prompt_logprobs=known)]).more)
    part = {"token_id": 8, "token": "\ufffd", "bytes": [0xC3]}
    assert json.loads(outputs["prompt_tokens"][0]) == [
        {"token_id": 2, "token": "", "special": "</s>"},
        {"token_id": 7, "token": " é"},
        part,
    ]
    top = [part | {"logprob": 0.0}]
    assert json.loads(outputs["prompt_logprobs"][0]) == [
        None,
        {"token_id": 7, "token": " é", "logprob": -2.0, "rank": 3, "top": top},
        part | {"logprob": -0.5, "rank": 1, "top": top},
    ]
    assert dict(encoder.encode([JobOutput("b", (8,))]).more) == {}


def test_a_long_prompt_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, num_top = 1000, 20
    request = decode_request(
        {"input_ids": np.full(num_tokens, 7, np.int32), "return_prompt_logprobs": np.array([True])},
        json.dumps({"prompt_logprobs": num_top}),
    )
    prompt_ids = array("i", [7] * num_tokens)
    known = PromptLogprobs(prompt_ids, num_top)
    tops = np.full((num_tokens - 1, num_top), 7, np.int32)
    alone = np.ones(num_tokens - 1, np.int32).tobytes()
    known.on_scores(PromptScores(alone, alone, tops.tobytes(), tops.tobytes()))
    spelled = Counter[int]()
    monkeypatch.setattr(TOKENIZER, "token_bytes", lambda token: spelled.update([token]) or b"a")
    encoder = ResponseEncoder(request, "", prompt_ids, WallClock(MonotonicClock()), TOKENIZER)
    output = JobOutput("a", (7,), prompt_logprobs=known)
    pieces = []
    while not encoder.encode_prompt(output):
        pieces.append(spelled.total())
        spelled.clear()
    assert len(pieces) > 20
    assert max(pieces) < 1000  # of 20,979 tokens
    (encoded,) = dict(encoder.encode([output]).more).values()
    entries = json.loads(encoded[0])
    assert len(entries) == num_tokens
    assert [len(entry["top"]) for entry in entries[1:]] == [num_top] * (num_tokens - 1)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_is_one_in_a_response(bad: float) -> None:
    tensors = {
        "input_ids": np.array([5], np.int32),
        "return_logprobs": np.array([True]),
        "return_cumulative_logprob": np.array([True]),
    }
    request = decode_request(tensors, "")
    encoder = ResponseEncoder(request, "", [5], WallClock(MonotonicClock()), TOKENIZER)
    logprobs = [TokenLogprob(7, bad, ()), TokenLogprob(8, -0.5, ())]
    outputs = dict(encoder.encode([JobOutput("ab", (7, 8), logprobs)]).more)
    assert outputs["cumulative_logprob"].tolist() == [-9999.5]
    entries = json.loads(outputs["logprobs"][0], parse_constant=pytest.fail)
    assert [entry["logprob"] for entry in entries] == [-9999.0, -0.5]
    assert [entry["token"] for entry in entries] == [" é", "\ufffd"]
    assert [entry.get("bytes") for entry in entries] == [None, [0xC3]]
