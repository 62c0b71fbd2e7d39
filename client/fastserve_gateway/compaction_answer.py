"""``POST /v1/responses/compact``: a conversation becomes a summary of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastserve_client.results import Completion

from fastserve_gateway.chat import ChatAnswer
from fastserve_gateway.compaction import MAX_SUMMARY_TOKENS, summary_item, with_request
from fastserve_gateway.model_formats import ModelFormats
from fastserve_gateway.responses_schema import RESPONSES_FIELDS
from fastserve_gateway.schemas import ChatRequest
from fastserve_gateway.stored_items import item_id, new_response_id


def compaction_chat(chat: ChatRequest, context_tokens: int) -> ChatRequest:
    """The chat completion whose answer is the summary of a conversation.

    Of a conversation that is too long, its last tokens are summarized.

    Args:
        context_tokens: the longest that prompt and answer may be together.
    """
    num_answer = min(MAX_SUMMARY_TOKENS, context_tokens // 4)
    return chat.model_copy(
        update={
            "messages": with_request(chat.messages),
            "stream": None,
            "tool_choice": "none",
            "response_format": None,
            "logprobs": None,
            "max_tokens": None,
            "max_completion_tokens": num_answer,
            "truncate_prompt_tokens": max(1, context_tokens - num_answer),
        }
    )


class CompactionAnswer(ChatAnswer):
    """Its JSON is that of OpenAI: the summary is an item, which later requests begin with."""

    def __init__(self, chat: ChatRequest, formats: ModelFormats) -> None:
        super().__init__(chat, formats)
        self._response_id = new_response_id()

    def field_names(self) -> Mapping[str, str]:
        return {name: RESPONSES_FIELDS.of(field) for name, field in super().field_names().items()}

    def whole(self, completions: Iterable[Completion]) -> dict[str, Any]:
        chat = super().whole(completions)
        message, usage = chat["choices"][0]["message"], chat["usage"]
        summary = message["content"] or message.get("reasoning_content") or ""
        return {
            "id": self._response_id,
            "object": "response.compaction",
            "created_at": chat["created"],
            "output": [summary_item(item_id("cmp", self._response_id, 0), summary)],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens() or 0},
                "total_tokens": usage["total_tokens"],
            },
        }
