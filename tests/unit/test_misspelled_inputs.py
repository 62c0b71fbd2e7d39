"""A misspelled name in a request is named, with the closest name that there is."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.serving.codec import decode_request
from numpy.typing import NDArray


@pytest.mark.parametrize(
    ("tensors", "parameters", "message"),
    [
        (
            {},
            {"text_inputs": "hi"},
            "text_inputs: got 'hi'; unknown parameter; did you mean text_input",
        ),
        (
            {"text_input": np.array([b"hi"], np.object_)},
            {"max_token": 4},
            "max_token: got 4; unknown parameter; did you mean max_tokens",
        ),
        (
            {"text_input": np.array([b"hi"], np.object_)},
            {"foo": 1},
            "foo: got 1; unknown parameter; allowed are stream, ",
        ),
        ({}, {}, "text_input, input_ids, messages: got 'none'; exactly one of"),
    ],
)
def test_a_misspelled_name(
    tensors: dict[str, NDArray[Any]], parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(tensors, json.dumps(parameters))
    assert str(caught.value).startswith(message)
