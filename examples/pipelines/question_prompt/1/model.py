"""Writes the prompt of a question."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        question = pb_utils.get_input_tensor_by_name(request, "question").as_numpy()[0]
        prompt = b"Question: " + question + b"\nAnswer:"
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("prompt", np.array([prompt], np.object_))]
        )
