"""The engine without a server: batch generation from Python."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from rich.progress import Progress

from fastserve_backend.checkpoints.chat_messages import check_messages
from fastserve_backend.checkpoints.chat_options import ChatOptions
from fastserve_backend.checkpoints.chat_template import Message
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.engine.service_levels import resolve_service
from fastserve_backend.errors import EngineError, InvalidRequestError, OverloadedError
from fastserve_backend.job import (
    DEFAULT_SERVICE,
    FinishReason,
    JobOutput,
    JobStats,
    ServiceLevel,
)
from fastserve_backend.length_prediction.prompt_text import last_user_words
from fastserve_backend.logprobs import TokenLogprob
from fastserve_backend.sampling_params import SamplingParams

# While prompts wait to be accepted, the engine is asked again this often.
_RETRY_S = 1.0

_T = TypeVar("_T")
Prompt = str | Sequence[int]
Conversation = Sequence[Message]


@dataclass(slots=True)
class Completion:
    """The whole answer to one prompt."""

    prompt: Prompt
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """With the parameter ``prompt_logprobs``, one for each token of the prompt; None for the
    first."""
    finish_reason: FinishReason | None = None
    stats: JobStats | None = None


class LLM:
    """One model with its ranks; use it in a ``with`` statement, or call ``close``.

    Args:
        model: a name or directory, as for ``fastserve serve``.
        options: any key of ``engine.yaml``, such as ``load_format="dummy"`` or ``max_num_seqs=32``.
        check_integrity: verify the block tables after every step, for tests.

    Raises:
        ConfigError, ModelError: the options or the model cannot be used.
        EngineError: the ranks did not start.
    """

    def __init__(self, model: str, *, check_integrity: bool = False, **options: Any) -> None:
        config = EngineConfig().with_keys(model=model, **options)
        self.engine = Engine(config, check_integrity=check_integrity)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the ranks and free their memory; idempotent."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: ServiceLevel | Sequence[ServiceLevel] = DEFAULT_SERVICE,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete all prompts, batched together; results are in the order of the prompts.

        Args:
            prompts: a text, token ids, or a list of either.
            params: one for all prompts, or one each. The model's own defaults replace what they
                leave out.
            service: one for all prompts, or one each. Objectives of the configuration replace those
                that they leave out. Errors show objectives in ms, as in requests.
            truncate_prompt_tokens: use only so many of each prompt's last tokens; -1: as many as
                leave room for ``max_tokens``. None: all.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be used. Nothing is generated
                then, unless the reason is a grammar that cannot be compiled.
            EngineError: the engine broke.
        """
        jobs = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in jobs]
        kept = self._kept_tokens(truncate_prompt_tokens, params, len(jobs))
        return self._complete(jobs, kept, texts, params, service, progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: ServiceLevel | Sequence[ServiceLevel] = DEFAULT_SERVICE,
        truncate_prompt_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        progress: bool = True,
    ) -> list[Completion]:
        """The model's answer to the last message of each conversation, by its chat template.

        Args:
            conversations: a list of messages, or a list of such lists. A message has a ``role`` and
                a ``content``, which is a text or a list of parts of type ``text``. An assistant's
                message with ``tool_calls`` needs no content.
            params, service, truncate_prompt_tokens: as for ``generate``.
            tools, chat_template_kwargs, add_generation_prompt, continue_final_message: as in
                ``ChatOptions``, for all conversations.

        Raises:
            InvalidRequestError: as ``generate``; also if a message is not valid, or the model has
                no chat template.
            EngineError: the engine broke.
        """
        jobs = [check_messages(one) for one in _as_conversations(conversations)]
        options = ChatOptions(
            tools, chat_template_kwargs, add_generation_prompt, continue_final_message
        )
        kept = self._kept_tokens(truncate_prompt_tokens, params, len(jobs))
        encode = self.engine.checks.encode_chat
        prompts = [
            encode(messages, options, most) for messages, most in zip(jobs, kept, strict=True)
        ]
        texts = [last_user_words(messages) for messages in jobs]
        return self._complete(prompts, kept, texts, params, service, progress)

    def _kept_tokens(
        self,
        truncate: int | None,
        params: SamplingParams | Sequence[SamplingParams] | None,
        number: int,
    ) -> list[int | None]:
        """How many of each prompt's last tokens are kept; None: all."""
        each = _one_each("params", SamplingParams() if params is None else params, number)
        return [self.engine.checks.kept_tokens(truncate, one) for one in each]

    def _token_ids(self, prompt: Prompt, kept: int | None) -> Sequence[int]:
        if isinstance(prompt, bytes | bytearray):  # a sequence of integers, but not of token ids
            raise InvalidRequestError("text_input", prompt, "must be text or token ids")
        if isinstance(prompt, str):
            return self.engine.checks.encode(prompt, kept)
        return prompt if kept is None else prompt[-kept:]

    def _complete(
        self,
        jobs: Sequence[Prompt],
        kept: Sequence[int | None],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
        service: ServiceLevel | Sequence[ServiceLevel],
        progress: bool,
    ) -> list[Completion]:
        """
        Args:
            kept: how many of each prompt's last tokens are used; None: all.
            texts: the user's words of each prompt; None if only its tokens are known.
        """
        params = SamplingParams() if params is None else params
        each = _one_each("params", params, len(jobs))
        services = _one_each("service", service, len(jobs))
        ids = [self._token_ids(prompt, most) for prompt, most in zip(jobs, kept, strict=True)]
        for prompt_ids, one, wanted in zip(ids, each, services, strict=True):
            self.engine.checks.validate(prompt_ids, one)
            self.engine.checks.token_rules(one)
            resolve_service(wanted, self.engine.config)
        completions = [Completion(prompt) for prompt in jobs]
        outputs: list[list[JobOutput]] = [[] for _ in jobs]
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        numbers: list[int] = []

        def receive(index: int, output: JobOutput) -> None:
            outputs[index].append(output)
            if output.finish_reason is not None:  # only an end wakes the caller
                ended.put(index)

        def submit_waiting() -> None:
            for index in range(len(numbers), len(jobs)):
                try:
                    number = self.engine.submit(
                        f"prompt-{index}",
                        ids[index],
                        each[index],
                        partial(receive, index),
                        service=services[index],
                        prompt_text=texts[index],
                    )
                except OverloadedError:
                    return  # the rest is submitted when a job has ended
                numbers.append(number)

        unfinished = len(jobs)
        try:
            with Progress(disable=not progress, transient=True) as bar:
                task = bar.add_task("generating", total=len(jobs))
                while unfinished:
                    submit_waiting()
                    try:
                        index = ended.get(timeout=_RETRY_S)
                    except queue.Empty:
                        continue  # jobs of other threads may have ended
                    for output in outputs[index]:
                        _add(completions[index], output)
                    unfinished -= 1
                    bar.advance(task)
        finally:
            for number, completion in zip(numbers, completions, strict=False):
                if completion.finish_reason is None:
                    self.engine.cancel(number)
        return completions


def _one_each(name: str, given: _T | Sequence[_T], number: int) -> list[_T]:
    """``number`` values: those given, or the one that is given for each.

    Raises:
        InvalidRequestError: another number is given.
    """
    each = list(given) if isinstance(given, Iterable) else [given] * number
    if len(each) != number:
        raise InvalidRequestError(
            name, len(each), f"must be one for all {number} prompts, or one each"
        )
    return each


def _add(completion: Completion, output: JobOutput) -> None:
    """Append the output.

    Raises:
        InvalidRequestError, EngineError: the job failed.
    """
    completion.text += output.text
    completion.token_ids.extend(output.token_ids)
    completion.logprobs.extend(output.logprobs)
    if output.prompt_logprobs is not None:
        completion.prompt_logprobs.extend(output.prompt_logprobs)
    if output.refusal is not None:
        raise output.refusal
    if output.finish_reason is FinishReason.ERROR:
        raise EngineError(output.error or "the engine failed")
    completion.finish_reason = output.finish_reason
    completion.stats = output.stats


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(conversations: Conversation | Sequence[Conversation]) -> Sequence[object]:
    """Anything that is not a list counts as one conversation, which ``check_messages`` refuses."""
    if not isinstance(conversations, Sequence) or isinstance(conversations, str):
        return [conversations]
    is_one = bool(conversations) and isinstance(conversations[0], Mapping)
    return [conversations] if is_one else conversations
