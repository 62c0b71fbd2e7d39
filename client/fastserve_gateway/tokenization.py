"""``POST /tokenize`` and ``POST /detokenize``, in the shapes of vLLM's API."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastserve_client import protocol
from fastserve_client.options import ChatTemplateOptions, Message
from fastserve_client.results import Tokenization
from pydantic import Field, PrivateAttr, model_validator

from fastserve_gateway.body_threads import RunWork
from fastserve_gateway.chat_conversion import FieldNames, chat_request
from fastserve_gateway.chat_message import MAX_MESSAGES
from fastserve_gateway.fleet.fleet import Fleet
from fastserve_gateway.jobs import encoded_prompts
from fastserve_gateway.list_fields import TokensField
from fastserve_gateway.model_formats import DescribedFormats
from fastserve_gateway.schemas import ChatRequest
from fastserve_gateway.strict_fields import Body
from fastserve_gateway.tool_fields import MAX_GIVEN_TOOLS

_CHAT_FIELDS = ("messages", *protocol.CHAT_OPTIONS)


class TaskBody(Body):
    """Fields of each request that is no job."""

    model: str | None = None

    def field_names(self) -> dict[str, str]:
        """Names of the server's fields in this request, where they differ from completions."""
        return {}


class TokenizeRequest(TaskBody):
    """Body of ``POST /tokenize``: a text, or what makes the prompt of a chat completion."""

    prompt: str | None = None
    messages: Annotated[list[Any], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Any], Field(max_length=MAX_GIVEN_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    _chat: ChatRequest | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _build_chat(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages is required")
        if self.messages is not None:
            fields = {name: getattr(self, name) for name in _CHAT_FIELDS}
            self._chat = chat_request({"model": self.model or "", **fields}, FieldNames(()))
        return self

    @property
    def chat(self) -> ChatRequest | None:
        """The chat completion with this prompt; None: the prompt is a text."""
        return self._chat

    def unknown_fields(self) -> list[str]:
        nested = [] if self._chat is None else self._chat.unknown_fields()
        return [*super().unknown_fields(), *nested]

    def field_names(self) -> dict[str, str]:
        return {protocol.TEXT_INPUT: "prompt" if self._chat is None else "messages"}


class DetokenizeRequest(TaskBody):
    """Body of ``POST /detokenize``."""

    tokens: TokensField

    def field_names(self) -> dict[str, str]:
        return {protocol.INPUT_IDS: "tokens"}


async def tokenize_chat(
    fleet: Fleet,
    described: DescribedFormats,
    request: ChatRequest,
    run: RunWork,
    *,
    add_special_tokens: bool | None = None,
    return_token_strs: bool = False,
) -> Tokenization:
    """The tokens of the prompt that the request would have.

    Args:
        run: runs work on the request's body.

    Raises ApiError, ClientError.
    """
    formats = await described.current()
    (messages,) = await run(lambda: encoded_prompts(formats.prompts(request)))
    options = await run(lambda: formats.options(request))
    chosen = {name: options.get(name) for name in protocol.CHAT_OPTIONS}
    return await fleet.tokenize(
        cast("list[Message]", messages),
        add_special_tokens=add_special_tokens,
        return_token_strs=return_token_strs,
        **cast("ChatTemplateOptions", chosen),
    )


async def tokenize_result(
    fleet: Fleet, formats: DescribedFormats, body: TokenizeRequest, run: RunWork
) -> dict[str, Any]:
    """The answer to ``POST /tokenize``. Raises ApiError, ClientError."""
    add_special_tokens, return_token_strs = body.add_special_tokens, bool(body.return_token_strs)
    if body.chat is None:
        found = await fleet.tokenize(
            body.prompt or "",
            add_special_tokens=add_special_tokens,
            return_token_strs=return_token_strs,
        )
    else:
        found = await tokenize_chat(
            fleet,
            formats,
            body.chat,
            run,
            add_special_tokens=add_special_tokens,
            return_token_strs=return_token_strs,
        )
    return {
        "count": found.count,
        "max_model_len": found.max_model_len,
        "tokens": found.token_ids,
        "token_strs": found.token_strs,
    }


async def detokenize_result(fleet: Fleet, body: DetokenizeRequest) -> dict[str, Any]:
    """The answer to ``POST /detokenize``. Raises ClientError."""
    return {"prompt": await fleet.detokenize(body.tokens)}
