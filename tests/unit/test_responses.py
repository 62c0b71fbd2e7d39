from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer
from fastserve_backend.job import JobOutput
from fastserve_backend.logprobs import TokenLogprob
from fastserve_backend.serving.codec import decode_request
from fastserve_backend.serving.responses import ResponseEncoder, WallClock
from fastserve_backend.system.clock import MonotonicClock

TOKENS = {2: b"", 7: " é".encode(), 8: "é".encode()[:1]}


class FewTokens(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id]


TOKENIZER = FewTokens(300)


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
