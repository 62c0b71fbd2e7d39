"""Requests that are no jobs, such as for a description of the model: they are answered at once."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils
from fastserve_client import protocol

from fastserve_backend.engine.engine import Engine
from fastserve_backend.serving.responses import strings
from fastserve_backend.serving.streaming import Emitter, RequestStream, ResponseChannel


class TaskStream(RequestStream):
    """A task that is done. ``result`` is the only response, which ``Emitter.wake`` sends."""

    def __init__(self, channel: ResponseChannel, emitter: Emitter, result: dict[str, Any]) -> None:
        super().__init__(channel, emitter)
        self._result = result

    def emit(self) -> None:
        text = json.dumps(self._result, ensure_ascii=False)
        self._channel.send([pb_utils.Tensor(protocol.TASK_RESULT, strings(text))], ends=True)

    def poll(self) -> None:
        """There is nothing to cancel."""


def describe(engine: Engine) -> dict[str, Any]:
    """The fields of a ``ModelDescription``."""
    return {
        "max_model_len": engine.checks.context_len,
        "chat_template": engine.tokenizer.chat_template,
        "tool_template": engine.tokenizer.tool_template,
    }
