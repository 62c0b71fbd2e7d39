"""Requests that are no jobs, such as for the tokens of a text: they are answered at once."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils
from fastserve_client import protocol

from fastserve_backend.engine.engine import Engine
from fastserve_backend.serving.codec import (
    DetokenizeTask,
    Task,
    TokenizeTask,
    refuse_unknown_keys,
)
from fastserve_backend.serving.preparation import is_long_text
from fastserve_backend.serving.responses import strings
from fastserve_backend.serving.streaming import Emitter, RequestStream, ResponseChannel

# Fewer have their text within milliseconds.
_MANY_TOKENS = 1 << 12


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


def takes_long(task: Task) -> bool:
    """Whether ``perform`` may take longer than some milliseconds."""
    if isinstance(task, TokenizeTask):
        return task.messages is not None or is_long_text(task.text)
    return isinstance(task, DetokenizeTask) and len(task.input_ids) > _MANY_TOKENS


def perform(task: Task, engine: Engine) -> dict[str, Any]:
    """The result of the task.

    Raises:
        InvalidRequestError: a text, conversation or token that could not be a prompt either.
    """
    if isinstance(task, TokenizeTask):
        return _tokenize(task, engine)
    if isinstance(task, DetokenizeTask):
        token_ids = engine.checks.accept_ids(task.input_ids)
        spelled = b"".join(map(engine.tokenizer.spelled_bytes, token_ids))
        return {"text": spelled.decode("utf-8", "replace")}
    return {
        "max_model_len": engine.checks.context_len,
        "chat_template": engine.tokenizer.chat_template,
        "tool_template": engine.tokenizer.tool_template,
    }


def _tokenize(task: TokenizeTask, engine: Engine) -> dict[str, Any]:
    checks, tokenizer = engine.checks, engine.tokenizer
    special_tokens = task.add_special_tokens
    if task.messages is not None:
        messages = checks.check_conversation(task.messages)
        refuse_unknown_keys(messages)
        token_ids = checks.encode_chat(messages, task.chat, special_tokens=special_tokens)
    elif task.text:
        token_ids = checks.encode(task.text, special_tokens=special_tokens)
    else:
        token_ids = tokenizer.encode("", special_tokens=special_tokens)
    result = {
        "token_ids": token_ids,
        "count": len(token_ids),
        "max_model_len": checks.context_len,
    }
    if task.return_token_strs:
        result["token_strs"] = [tokenizer.written(token_id) for token_id in token_ids]
    return result
