"""From a request's prompt to token ids, and whether the model can ever serve such a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastserve_backend.checkpoints.chat_messages import check_messages
from fastserve_backend.checkpoints.chat_template import Message
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.tokenizer import TokenizationError, Tokenizer
from fastserve_backend.errors import ContextLengthError, InvalidRequestError
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.structured_output import FIELD

_CHARS_A_TOKEN = 8
# A word that is cut may have more tokens than the whole word.
_CUT_TOKENS = 64


class RequestChecks:
    """Refuses what cannot be served before it becomes a job. May be called from any thread.

    Args:
        kv_capacity: tokens whose KV the device holds now; fresh ranks may hold another number.
    """

    def __init__(
        self, model_config: ModelConfig, tokenizer: Tokenizer, kv_capacity: Callable[[], int]
    ) -> None:
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._kv_capacity = kv_capacity

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidRequestError: nothing to continue.
            ContextLengthError: too long (a text that is hopelessly long is refused before it costs
                the time to tokenize it).
        """
        self._check_length("text_input", len(text))
        try:
            ids = self._tokenize("text_input", text, special_tokens=True)
        except TokenizationError as error:
            raise InvalidRequestError("text_input", text, str(error)) from None
        if not ids:
            raise InvalidRequestError("text_input", text, "must give at least one token")
        return ids

    def check_conversation(self, messages: Sequence[object]) -> list[Message]:
        """The messages as ``check_messages`` returns them.

        Raises:
            InvalidRequestError: one of them is none.
            ContextLengthError: too many, which is said before each is looked at: hundreds of
                thousands would take seconds, in which no other request is accepted.
        """
        if len(messages) > self._max_prompt_tokens:  # each takes a token at least
            raise self._too_long("messages", f"{len(messages)} messages")
        return check_messages(messages)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the prompt that the model's chat template makes of a conversation.

        Raises:
            InvalidRequestError: messages that are none, no template, or messages that it refuses.
            ContextLengthError: too long.
        """
        messages = self.check_conversation(messages)
        given = f"{len(messages)} messages"
        self._check_length("messages", sum(len(m["role"]) + len(m["content"]) for m in messages))
        try:
            text = self._tokenizer.render_chat(messages)
            self._check_length("messages", len(text))
            return self._tokenize("messages", text, special_tokens=False)
        except TokenizationError as error:
            raise InvalidRequestError("messages", given, str(error)) from None

    def accept_ids(self, ids: NDArray[np.integer[Any]]) -> list[int]:
        """A prompt that comes as token ids, [n] with n > 0.

        Raises:
            InvalidRequestError: one that the vocabulary lacks.
            ContextLengthError: too many.
        """
        if len(ids) > self._max_prompt_tokens:
            raise self._too_long("input_ids", f"{len(ids)} tokens")
        accepted: list[int] = ids.tolist()
        self._check_vocabulary(accepted)
        return accepted

    def clip_max_tokens(self, prompt_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """``params`` with max_tokens lowered to what the model and its KV cache leave room for.

        At least 1 stays, so that ``validate`` refuses a prompt that leaves none.

        Raises InvalidRequestError: min_tokens do not fit.
        """
        room = max(1, self._context_len - len(prompt_ids))
        return replace(params, max_tokens=min(params.max_tokens, room))

    def validate(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Whether this model and cache can ever serve such a job.

        Raises:
            InvalidRequestError: no tokens, or one that the vocabulary lacks; a structured output
                that could not end.
            ContextLengthError: prompt and output are too long together.
        """
        if len(prompt_ids) == 0:
            raise InvalidRequestError("input_ids", "no tokens", "must have at least one token")
        self._check_vocabulary(prompt_ids)
        for field, token_ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
        ):
            beyond = max(token_ids, default=0)
            if beyond >= self._model_config.vocab_size:
                raise self._unknown_token(field, beyond)
        wanted = params.structured_output
        if wanted is not None and not self._model_config.eos_token_ids:
            allowed = "the model has no end-of-sequence token, with which such an answer ends"
            raise InvalidRequestError(FIELD, wanted.kind, allowed)
        room = self._context_len - len(prompt_ids)
        if room < 1:
            raise self._too_long("text_input", f"{len(prompt_ids)} tokens")
        if params.max_tokens > room:
            remedy = f"and the prompt has {len(prompt_ids)}, so at most {room}"
            raise self._overflow("max_tokens", params.max_tokens, remedy)

    def _tokenize(self, field: str, text: str, *, special_tokens: bool) -> list[int]:
        # Hopelessly long ones take seconds, in which no other request is accepted. Their beginning
        # tells: most texts have a token for every four characters or so.
        most = self._max_prompt_tokens
        if len(text) > _CHARS_A_TOKEN * most:
            beginning = self._tokenizer.encode(text[: _CHARS_A_TOKEN * most], special_tokens=False)
            if len(beginning) > most + _CUT_TOKENS:
                raise self._too_long(field, f"{len(text)} characters")
        return self._tokenizer.encode(text, special_tokens=special_tokens)

    def _check_vocabulary(self, ids: Sequence[int]) -> None:
        vocab_size = self._model_config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise self._unknown_token("input_ids", bad)

    def _unknown_token(self, field: str, token_id: int) -> InvalidRequestError:
        last = self._model_config.vocab_size - 1
        return InvalidRequestError(field, token_id, f"token ids are 0 to {last}")

    def _check_length(self, field: str, num_chars: int) -> None:
        if num_chars > self._max_prompt_tokens * self._tokenizer.max_token_bytes:
            raise self._too_long(field, f"{num_chars} characters")

    def _too_long(self, field: str, given: str) -> ContextLengthError:
        return self._overflow(field, given, f"so a prompt has at most {self._max_prompt_tokens}")

    def _overflow(self, field: str, given: object, remedy: str) -> ContextLengthError:
        limit = self._context_len
        if limit < self._model_config.max_model_len:
            remedy = f"all that the KV cache holds, {remedy}"
        return ContextLengthError(field, given, limit, remedy)

    @property
    def _max_prompt_tokens(self) -> int:
        return self._context_len - 1

    @property
    def _context_len(self) -> int:
        return min(self._model_config.max_model_len, self._kv_capacity())
