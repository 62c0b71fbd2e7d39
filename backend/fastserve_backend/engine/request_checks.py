"""Tokenize prompts, and refuse requests that the model can never serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fastserve_client import protocol
from numpy.typing import NDArray

from fastserve_backend.checkpoints.chat_messages import check_messages
from fastserve_backend.checkpoints.chat_options import DEFAULT_CHAT, ChatOptions
from fastserve_backend.checkpoints.chat_template import Message
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.tokenizer import TokenizationError, Tokenizer
from fastserve_backend.errors import ContextLengthError, InvalidRequestError
from fastserve_backend.grammars.structured_output import FIELD
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.token_rules import TokenRules

_CHARS_A_TOKEN = 8
# Cutting a text in the middle of a word may give more tokens than the whole word has.
_CUT_TOKENS = 64
# Log-probabilities in the answer to one prompt, those of its tokens and of others. Each is about 70
# bytes of JSON, which server, stub and client hold several times.
MAX_PROMPT_LOGPROBS = 1 << 18


class RequestChecks:
    """Checks requests before they become jobs. May be called from any thread.

    Args:
        kv_capacity: returns the number of tokens whose KV fits on the device. It may change when
            the ranks are replaced.
    """

    def __init__(
        self, model_config: ModelConfig, tokenizer: Tokenizer, kv_capacity: Callable[[], int]
    ) -> None:
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._kv_capacity = kv_capacity

    def kept_tokens(
        self, truncate: int | None, params: SamplingParams, *, clips: bool = False
    ) -> int | None:
        """How many of a prompt's last tokens are kept, by ``truncate_prompt_tokens``; None: all.

        Args:
            truncate: -1: as many as leave room for ``max_tokens``.
            clips: whether ``max_tokens`` may be lowered to what fits.

        Raises:
            InvalidRequestError: it is neither -1 nor at least 1.
        """
        if truncate is None:
            return None
        if type(truncate) is not int or truncate < -1 or truncate == 0:
            allowed = "must be an integer, at least 1, or -1 for as many as there is room for"
            raise InvalidRequestError("truncate_prompt_tokens", truncate, allowed)
        most = self._max_prompt_tokens
        if truncate == -1:
            return most if clips else max(1, self.context_len - params.max_tokens)
        return None if truncate > most else truncate  # a longer prompt is refused as it is

    def encode(
        self, text: str, kept: int | None = None, *, special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
            kept: how many of the last ones; None: all.
            special_tokens: add the tokens that the model expects around a prompt.

        Raises:
            InvalidRequestError: the text has no token.
            ContextLengthError: it is too long. A hopelessly long text is refused before it costs
                the time to tokenize it.
        """
        try:
            ids = self._tokenize("text_input", text, kept, special_tokens=special_tokens)
        except TokenizationError as error:
            raise InvalidRequestError("text_input", text, str(error)) from None
        if not ids:
            raise InvalidRequestError("text_input", text, "must give at least one token")
        return ids

    def check_conversation(self, messages: Sequence[object]) -> list[Message]:
        """The messages as ``check_messages`` returns them.

        Raises:
            InvalidRequestError: one of them is not a valid message.
            ContextLengthError: there are too many. Their number is checked first: looking at
                hundreds of thousands takes seconds, in which no other request is accepted.
        """
        if len(messages) > self._max_prompt_tokens:  # each has at least one token
            raise self._too_long("messages", f"{len(messages)} messages")
        return check_messages(messages)

    def encode_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions = DEFAULT_CHAT,
        kept: int | None = None,
        *,
        special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template.

        Args:
            kept: how many of the last ones; None: all.
            special_tokens: as for ``encode``. Templates mostly write these tokens themselves.

        Raises:
            InvalidRequestError: a message is not valid, the model has no template, the template
                refuses the messages, or the last message to be continued is not the assistant's.
            ContextLengthError: it is too long.
        """
        messages = self.check_conversation(messages)
        given = f"{len(messages)} messages"
        if options.continue_final_message and messages[-1]["role"] != "assistant":
            allowed = "the last message must be the assistant's with continue_final_message"
            raise InvalidRequestError("messages", messages[-1]["role"], allowed)
        if kept is None:
            num_chars = sum(len(m["role"]) + len(m["content"]) for m in messages)
            self._check_length("messages", num_chars)
        try:
            text = self._tokenizer.render_chat(messages, options)
            if kept is None:
                self._check_length("messages", len(text))
            return self._tokenize("messages", text, kept, special_tokens=special_tokens)
        except TokenizationError as error:
            raise InvalidRequestError("messages", given, str(error)) from None

    def accept_ids(self, ids: NDArray[np.integer[Any]], kept: int | None = None) -> list[int]:
        """Check a prompt given as token ids, [n] with n > 0; returns them as a list.

        Args:
            kept: how many of the last ones; None: all. The others are not looked at.

        Raises:
            InvalidRequestError: the vocabulary lacks one of them.
            ContextLengthError: there are too many.
        """
        if kept is not None:
            ids = ids[-kept:]
        if len(ids) > self._max_prompt_tokens:
            raise self._too_long("input_ids", f"{len(ids)} tokens")
        accepted: list[int] = ids.tolist()
        self._check_vocabulary(accepted)
        return accepted

    def clip_max_tokens(self, prompt_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """``params`` with ``max_tokens`` lowered so that prompt and output fit the context.

        It stays at least 1: ``validate`` refuses a prompt that leaves no room.

        Raises:
            InvalidRequestError: ``min_tokens`` do not fit.
        """
        room = max(1, self.context_len - len(prompt_ids))
        return replace(params, max_tokens=min(params.max_tokens, room))

    def rest_of_answer(
        self, earlier_ids: Sequence[int] | NDArray[np.int32], params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        """Checks the output that the client of a continued answer has already, [n]; returns it as
        a list, and the ``params`` of the rest. ``validate`` first.

        Raises:
            InvalidRequestError: it has unknown tokens, is as long as the answer may be, or comes
                with a request for log-probabilities of the prompt.
        """
        if len(earlier_ids) == 0:
            return [], params
        field, num_earlier = protocol.OUTPUT_IDS_SO_FAR, len(earlier_ids)
        if num_earlier >= params.max_tokens:
            allowed = f"must be fewer than max_tokens, which is {params.max_tokens}"
            raise InvalidRequestError(field, f"{num_earlier} tokens", allowed)
        if params.prompt_logprobs is not None:
            allowed = f"must be left out with {field}; they came with the answer's beginning"
            raise InvalidRequestError("prompt_logprobs", params.prompt_logprobs, allowed)
        accepted = list(map(int, earlier_ids))
        self._check_vocabulary(accepted, field)
        most, least = params.max_tokens - num_earlier, max(0, params.min_tokens - num_earlier)
        return accepted, replace(params, max_tokens=most, min_tokens=least)

    def validate(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse a job that this model and its KV cache can never serve.

        Raises:
            InvalidRequestError: the prompt is empty, the vocabulary lacks a token, a structured
                output could not end, or too many log-probabilities of the prompt are wanted.
            ContextLengthError: prompt and output together are too long.
        """
        if len(prompt_ids) == 0:
            raise InvalidRequestError("input_ids", "no tokens", "must have at least one token")
        self._check_vocabulary(prompt_ids)
        for field, token_ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            beyond = max(token_ids, default=0)
            if beyond >= self._model_config.vocab_size:
                raise self._unknown_token(field, beyond)
        wanted = params.structured_output
        if wanted is not None and not self._model_config.eos_token_ids:
            allowed = "the model has no end-of-sequence token, with which such an answer ends"
            raise InvalidRequestError(FIELD, wanted.kind, allowed)
        num_top = params.prompt_logprobs
        if num_top is not None and len(prompt_ids) * (1 + num_top) > MAX_PROMPT_LOGPROBS:
            most = MAX_PROMPT_LOGPROBS // len(prompt_ids) - 1
            remedy = "must be left out" if most < 0 else f"must be at most {most}"
            allowed = f"{remedy}, because the prompt has {len(prompt_ids)} tokens"
            raise InvalidRequestError("prompt_logprobs", num_top, allowed)
        room = self.context_len - len(prompt_ids)
        if room < 1:
            raise self._too_long("text_input", f"{len(prompt_ids)} tokens")
        if params.max_tokens > room:
            remedy = f"and the prompt has {len(prompt_ids)}, so at most {room}"
            raise self._overflow("max_tokens", params.max_tokens, remedy)

    def token_rules(self, params: SamplingParams) -> TokenRules | None:
        """As ``TokenRules.of``, for this model. ``validate`` first."""
        return TokenRules.of(params, self._tokenizer, self._model_config)

    def _tokenize(
        self, field: str, text: str, kept: int | None, *, special_tokens: bool
    ) -> list[int]:
        if kept is not None:
            return self._last_tokens(text, kept, special_tokens=special_tokens)
        self._check_length(field, len(text))
        # Tokenizing a hopelessly long text takes seconds, in which no other request is accepted. So
        # first its beginning is tokenized: most texts have a token for every four characters or so.
        most = self._max_prompt_tokens
        if len(text) > _CHARS_A_TOKEN * most:
            beginning = self._tokenizer.encode(text[: _CHARS_A_TOKEN * most], special_tokens=False)
            if len(beginning) > most + _CUT_TOKENS:
                raise self._too_long(field, f"{len(text)} characters")
        return self._tokenizer.encode(text, special_tokens=special_tokens)

    def _last_tokens(self, text: str, kept: int, *, special_tokens: bool) -> list[int]:
        # Of a hopelessly long text only the end is tokenized, too. Its tokens are the same whatever
        # comes long before them.
        num_chars = _CHARS_A_TOKEN * self._max_prompt_tokens
        if len(text) > num_chars:
            ending = self._tokenizer.encode(text[-num_chars:], special_tokens=special_tokens)
            if len(ending) > kept + _CUT_TOKENS:
                return ending[-kept:]
            text = text[-(kept + _CUT_TOKENS) * self._tokenizer.max_token_bytes :]
        return self._tokenizer.encode(text, special_tokens=special_tokens)[-kept:]

    def _check_vocabulary(self, ids: Sequence[int], field: str = protocol.INPUT_IDS) -> None:
        vocab_size = self._model_config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise self._unknown_token(field, bad)

    def _unknown_token(self, field: str, token_id: int) -> InvalidRequestError:
        last = self._model_config.vocab_size - 1
        return InvalidRequestError(field, token_id, f"token ids are 0 to {last}")

    def _check_length(self, field: str, num_chars: int) -> None:
        if num_chars > self._max_prompt_tokens * self._tokenizer.max_token_bytes:
            raise self._too_long(field, f"{num_chars} characters")

    def _too_long(self, field: str, given: str) -> ContextLengthError:
        return self._overflow(field, given, f"so a prompt has at most {self._max_prompt_tokens}")

    def _overflow(self, field: str, given: object, remedy: str) -> ContextLengthError:
        limit = self.context_len
        if limit < self._model_config.max_model_len:
            remedy = f"all that the KV cache holds, {remedy}"
        return ContextLengthError(field, given, limit, remedy)

    @property
    def _max_prompt_tokens(self) -> int:
        return self.context_len - 1

    @property
    def context_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return min(self._model_config.max_model_len, self._kv_capacity())
