"""Answers of ``POST /v1/responses``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastserve_chat.call_messages import assistant_message, function_call
from fastserve_client.options import ServiceOptions
from fastserve_client.results import TokenLogprob

from fastserve_gateway.answer import named_event
from fastserve_gateway.block_answer import Block, BlockAnswer
from fastserve_gateway.chat import token_logprobs
from fastserve_gateway.custom_tools import custom_input
from fastserve_gateway.errors import ApiError
from fastserve_gateway.jobs import CompletionJob
from fastserve_gateway.model_formats import ModelFormats
from fastserve_gateway.responses_schema import RESPONSES_FIELDS, ResponsesRequest
from fastserve_gateway.responses_tools import NamedTool
from fastserve_gateway.schemas import ChatRequest
from fastserve_gateway.stored_items import item_id, new_response_id

_ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_CUSTOM_PREFIX = "ctc"

OnResponse = Callable[[Mapping[str, Any], Mapping[str, Any], str | None], bool]
"""Called with a whole response, with it as a message of a conversation, and with the session of
that. Returns whether the response is stored."""


class ResponsesAnswer(BlockAnswer):
    """A response, whose items are messages, reasoning and calls of functions.

    Args:
        chat: the chat completion that it asks for.
        session_id: of the stored conversation that it continues.
        on_response: stores the response; ``None``: it is not to be stored.
    """

    is_stored = True

    def __init__(
        self,
        request: ResponsesRequest,
        chat: ChatRequest,
        formats: ModelFormats,
        session_id: str | None,
        on_response: OnResponse | None,
    ) -> None:
        super().__init__(chat, formats, RESPONSES_FIELDS, request.template_variables())
        self._request = request
        self._id = new_response_id()
        self._session_id = session_id
        self._on_response = on_response
        self._created = int(time.time())
        self._num_events = 0
        self._num_placed = 0
        """Log-probabilities that are in blocks."""

    def jobs(self, service: ServiceOptions) -> list[CompletionJob]:
        """A stored conversation is a session, unless the request names another one."""
        begun = self._session_id if self._on_response is None else self._session_id or self._id
        self._session_id = service.get("session_id") or begun
        return super().jobs({**service, "session_id": self._session_id})

    def result(self) -> dict[str, Any]:
        texts = [block for block in self._blocks if block.kind == "text"]
        if texts:
            texts[0].logprobs += self._new_logprobs()
        elif not self._blocks:
            self._blocks.append(Block(0, "text"))
        return self._end()

    def first_events(self) -> Iterator[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def start_events(self, block: Block) -> Iterator[bytes]:
        item = self._item(block, "in_progress")
        if block.kind == "call":
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            return
        item["content"] = []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        yield self._event("response.content_part.added", **self._place(block), part=_part(block))

    def delta_events(self, block: Block, text: str) -> Iterator[bytes]:
        place = self._place(block)
        if block.kind == "call":
            if not self._is_custom(block):  # whose input is inside the JSON that comes here
                yield self._event("response.function_call_arguments.delta", **place, delta=text)
        elif block.kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **place, delta=text)
        else:
            entries = self._new_logprobs()
            block.logprobs += entries
            logprobs = token_logprobs(entries)
            yield self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def end_events(self, block: Block) -> Iterator[bytes]:
        place, text = self._place(block), block.text
        if self._is_custom(block):
            given = custom_input(text)
            yield self._event("response.custom_tool_call_input.delta", **place, delta=given)
            yield self._event("response.custom_tool_call_input.done", **place, input=given)
        elif block.kind == "call":
            yield self._event("response.function_call_arguments.done", **place, arguments=text)
        else:
            if block.kind == "reasoning":
                yield self._event("response.reasoning_text.done", **place, text=text)
            else:
                block.logprobs += self._new_logprobs()
                logprobs = token_logprobs(block.logprobs)
                yield self._event(
                    "response.output_text.done", **place, text=text, logprobs=logprobs
                )
            yield self._event("response.content_part.done", **place, part=_part(block))
        item = self._item(block, self._status(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def last_events(self) -> Iterator[bytes]:
        if not self._blocks:
            self._blocks.append(Block(0, "text"))
            yield from self.start_events(self._blocks[0])
            yield from self.end_events(self._blocks[0])
        response = self._end()
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", error={"code": code, "message": str(error)})
        return self._event("response.failed", response=response)

    def _end(self) -> dict[str, Any]:
        """The whole response. Stores it."""
        output = [self._item(block, self._status(block)) for block in self._blocks]
        usage = self._usage
        more = {
            "output": output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.num_cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._chat.reasoning_tokens() or 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if self.is_cut_off:
            details = {"reason": "max_output_tokens"}
            response = self._response("incomplete", incomplete_details=details, **more)
        else:
            response = self._response("completed", completed_at=int(time.time()), **more)
        if self._on_response is not None:
            response["store"] = self._on_response(response, self._message(), self._session_id)
        return response

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        request = self._request
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": request.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort},
            "store": self._on_response is not None,
            "temperature": request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "user": request.user,
            **more,
        }
        if request.answered_tier is not None:
            response["service_tier"] = request.answered_tier
        return response

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": [_part(block)]}
        if block.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": [_part(block)]}
        called = self._called(block)
        assert block.call is not None
        assert called is not None
        item |= {"call_id": block.call.id, "name": called.name}
        if called.namespace is not None:
            item["namespace"] = called.namespace
        if called.is_custom:
            return item | {"type": "custom_tool_call", "input": custom_input(block.text)}
        return item | {"type": "function_call", "arguments": block.text}

    def _called(self, block: Block) -> NamedTool | None:
        """The tool that the block calls; None: it is no call."""
        if block.call is None:
            return None
        return self._request.response_tools.called(block.call.name)

    def _is_custom(self, block: Block) -> bool:
        called = self._called(block)
        return called is not None and called.is_custom

    def _status(self, block: Block) -> str:
        """Of an item that gets no more text. A stop word may have cut off a call."""
        is_cut_off = self.is_cut_off and block is self._blocks[-1]
        is_half = block.kind == "call" and block.arguments() is None
        return "incomplete" if is_cut_off or is_half else "completed"

    def _item_id(self, block: Block) -> str:
        prefix = _CUSTOM_PREFIX if self._is_custom(block) else _ID_PREFIXES[block.kind]
        return item_id(prefix, self._id, block.index)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(payload)

    def _new_logprobs(self) -> list[TokenLogprob]:
        """Those that are in no block yet."""
        found = self._logprobs[self._num_placed :]
        self._num_placed = len(self._logprobs)
        return found

    def _message(self) -> dict[str, Any]:
        """The response as a message, without a call that is cut off."""
        texts = {
            kind: "".join(block.text for block in self._blocks if block.kind == kind)
            for kind in ("text", "reasoning")
        }
        calls = [
            function_call(block.call.id, block.call.name, block.text)
            for block in self._blocks
            if block.call is not None and block.arguments() is not None
        ]
        return assistant_message(texts["text"], texts["reasoning"], calls)


def _part(block: Block) -> dict[str, Any]:
    """The content of an item."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    logprobs = token_logprobs(block.logprobs)
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
