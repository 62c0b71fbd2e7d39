"""The output tensors of a response, as numpy arrays by name."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from fastserve_client import protocol
from numpy.typing import NDArray

from fastserve_backend.checkpoints.tokenizer import Tokenizer
from fastserve_backend.job import JobOutput, JobStats
from fastserve_backend.logprobs import TokenLogprob
from fastserve_backend.serving.codec import GenerateRequest
from fastserve_backend.system.clock import Clock

Tensors = list[tuple[str, NDArray[Any]]]

# Encoding a token and its log-probability takes about 5 µs.
_TOKENS_AT_ONCE = 512
_NS_PER_S = 1_000_000_000
# In place of infinity and NaN, as of a model that overflows: JSON has neither.
_NO_LOGPROB = -9999.0


class WallClock:
    """Turns seconds of the engine's clock into nanoseconds since the Unix epoch.

    The offset of the two clocks is measured once, so when the system's time is set later, the
    intervals between a job's times stay true.
    """

    def __init__(self, clock: Clock) -> None:
        self._offset_ns = time.time_ns() - int(clock.now() * _NS_PER_S)

    def nanoseconds(self, engine_time_s: float | None) -> int:
        """The time in ns; 0 for None, an event that did not happen."""
        if engine_time_s is None:
            return 0
        return int(engine_time_s * _NS_PER_S) + self._offset_ns


class Response(NamedTuple):
    """What a response says."""

    text: str
    token_ids: tuple[int, ...]
    more: Tensors
    """Outputs that not every response has."""


class ResponseEncoder:
    """Builds the responses of one request, in order.

    Args:
        prompt: comes before the text of the first response; empty for none.
        prompt_ids: all tokens of the prompt.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompt: str,
        prompt_ids: Sequence[int],
        wall_clock: WallClock,
        tokenizer: Tokenizer,
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._wall_clock = wall_clock
        self._specials = tokenizer.specials
        skips_specials = request.params.skip_special_tokens
        self._token_bytes = tokenizer.token_bytes if skips_specials else tokenizer.spelled_bytes
        self._prompt_ids = prompt_ids
        self._is_first = True
        self._cumulative_logprob = 0.0
        # Of the prompt's tokens: those that are left to encode, None before the first, and JSON.
        self._entries: Iterator[TokenLogprob | None] | None = None
        self._encoded: list[str] = []

    def encode_prompt(self, output: JobOutput) -> bool:
        """Encode some of what ``output`` says about the prompt; returns whether that is all.

        A call takes a few milliseconds: other streams wait meanwhile. ``encode`` does what is left.
        """
        if not self._request.return_prompt_logprobs or output.prompt_logprobs is None:
            return True
        if self._entries is None:
            self._entries = iter(output.prompt_logprobs)
        num_entries = max(1, _TOKENS_AT_ONCE // (1 + output.prompt_logprobs.num_top))
        some = [
            json.dumps(self._prompt_entry(entry), ensure_ascii=False)
            for entry in islice(self._entries, num_entries)
        ]
        self._encoded += some
        return len(some) < num_entries

    def encode(self, outputs: Sequence[JobOutput]) -> Response:
        """One response with all of ``outputs``; the last of them may end the job."""
        request = self._request
        text = "".join([output.text for output in outputs])
        token_ids = tuple([token for output in outputs for token in output.token_ids])
        tensors: Tensors = []
        if self._is_first:
            self._is_first = False
            text = self._prompt + text
            self._add_prompt(tensors, outputs[0])
        last = outputs[-1]
        # Values of the whole request come once, at its end: each tensor of a response costs server,
        # stub and client tens of microseconds a token.
        if last.finish_reason is not None:
            if request.return_finish_reason:
                tensors.append((protocol.FINISH_REASON, strings(last.finish_reason.value)))
            assert last.stats is not None
            if request.return_num_input_tokens:
                tensors.append((protocol.NUM_INPUT_TOKENS, _count(last.stats.num_input_tokens)))
            if request.return_num_cached_tokens:
                tensors.append((protocol.NUM_CACHED_TOKENS, _count(last.stats.num_cached_tokens)))
        if request.return_num_output_tokens:
            tensors.append((protocol.NUM_OUTPUT_TOKENS, _count(len(token_ids))))
        if request.params.logprobs is not None:
            logprobs = [entry for output in outputs for entry in output.logprobs]
            self._add_logprobs(tensors, logprobs)
        if request.return_perf_metrics and last.stats is not None:
            tensors += self._perf_metrics(last.stats)
        return Response(text, token_ids, tensors)

    def _add_prompt(self, tensors: Tensors, output: JobOutput) -> None:
        if self._request.return_prompt_tokens:
            tokens = map(self._prompt_token, self._prompt_ids)
            tensors.append((protocol.PROMPT_TOKENS, _json_list(tokens)))
        while not self.encode_prompt(output):
            pass
        if self._entries is not None:
            encoded, self._encoded = strings(f"[{', '.join(self._encoded)}]"), []
            tensors.append((protocol.PROMPT_LOGPROBS_OUTPUT, encoded))

    def _prompt_token(self, token_id: int) -> dict[str, Any]:
        special = self._specials.get(token_id)
        return self._text_of(token_id) | ({} if special is None else {"special": special})

    def _prompt_entry(self, entry: TokenLogprob | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        described = self._token(entry.token_id, entry.logprob) | {"rank": entry.rank}
        if self._request.params.prompt_logprobs:
            described["top"] = [self._token(token, logprob) for token, logprob in entry.top]
        return described

    def _add_logprobs(self, tensors: Tensors, logprobs: list[TokenLogprob]) -> None:
        self._cumulative_logprob += sum(_finite(entry.logprob) for entry in logprobs)
        if self._request.return_cumulative_logprob:
            value = np.array([self._cumulative_logprob], np.float32)
            tensors.append((protocol.CUMULATIVE_LOGPROB, value))
        if self._request.return_logprobs:
            entries = map(self._logprob_entry, logprobs)
            tensors.append((protocol.LOGPROBS_OUTPUT, _json_list(entries)))

    def _logprob_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        described = self._token(entry.token_id, entry.logprob)
        if self._request.params.logprobs:
            described["top"] = [self._token(token, logprob) for token, logprob in entry.top]
        return described

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return self._text_of(token_id) | {"logprob": _finite(logprob)}

    def _text_of(self, token_id: int) -> dict[str, Any]:
        spelled = self._token_bytes(token_id)
        text = spelled.decode(errors="replace")
        described: dict[str, Any] = {"token_id": token_id, "token": text}
        if text.encode() != spelled:  # part of a character
            described["bytes"] = list(spelled)
        return described

    def _perf_metrics(self, stats: JobStats) -> Tensors:
        nanoseconds = self._wall_clock.nanoseconds
        values = {
            protocol.ARRIVAL_TIME_NS: nanoseconds(stats.arrival_s),
            protocol.FIRST_SCHEDULED_TIME_NS: nanoseconds(stats.first_scheduled_s),
            protocol.FIRST_TOKEN_TIME_NS: nanoseconds(stats.first_token_s),
            protocol.LAST_TOKEN_TIME_NS: nanoseconds(stats.last_token_s),
            protocol.NUM_PREEMPTIONS: stats.num_preemptions,
            protocol.NUM_SWAPS: stats.num_swaps,
            protocol.QUEUE_LEVEL: stats.queue_level,
        }
        return [
            (spec.name, np.array([values[spec.name]], spec.datatype.lower()))
            for spec in protocol.PERF_OUTPUTS
        ]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_LOGPROB


def _count(number: int) -> NDArray[Any]:
    return np.array([number], np.uint32)


def _json_list(values: Iterable[Any]) -> NDArray[Any]:
    # One by one: json.dumps would hold the interpreter's lock for a whole list, which may be long.
    return strings("[" + ", ".join(json.dumps(one, ensure_ascii=False) for one in values) + "]")


def strings(text: str) -> NDArray[Any]:
    """A tensor of one text."""
    return np.array([text.encode("utf-8")], dtype=np.object_)
