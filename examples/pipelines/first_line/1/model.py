"""Streams the first line of the LLM's answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_AT_ONCE = 8


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._threads.submit(self._answer, request, request.get_response_sender())

    def finalize(self) -> None:
        self._threads.shutdown()

    def _answer(self, request: Any, sender: Any) -> None:
        try:
            error = self._stream(request, sender)
        except Exception as problem:
            error = pb_utils.TritonError(str(problem))
        if error is not None:
            sender.send(pb_utils.InferenceResponse(error=error))
        # A client without this flag would wait for ever.
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _stream(self, request: Any, sender: Any) -> Any:
        """Returns the LLM's error, or None."""
        call = pb_utils.InferenceRequest(
            model_name="fastserve",
            requested_output_names=["text_output"],
            inputs=[*request.inputs(), pb_utils.Tensor("stream", np.array([True]))],
        )
        responses = call.exec(decoupled=True)
        is_over = False
        # To the end: Triton could not unload this model if responses were left.
        for response in responses:
            if response.has_error():  # Triton 24.10 would let it wait for more in vain
                return response.error()
            if response.output_tensors() and not is_over:
                text = response.output_tensors()[0].as_numpy()[0].decode()
                line, newline, _ = text.partition("\n")
                sender.send(pb_utils.InferenceResponse([_text_output(line)]))
                is_over = bool(newline) or sender.is_cancelled()
                if is_over:
                    _cancel(responses)
        return None


def _text_output(text: str) -> Any:
    return pb_utils.Tensor("text_output", np.array([text.encode()], np.object_))


def _cancel(responses: Any) -> None:
    # Triton has this since 25.04. With an older one the LLM goes on to max_tokens.
    if hasattr(responses, "cancel"):
        responses.cancel()
