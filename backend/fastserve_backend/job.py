"""A job: one request inside the engine, and what the engine reports about it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.sampling_params import SamplingParams


class JobState(enum.Enum):
    """``WAITING → RUNNING ⇄ PREEMPTED → FINISHED``.

    WAITING: accepted, never scheduled. RUNNING: part of the latest iteration. PREEMPTED: scheduled
    before, not in the latest iteration. FINISHED: ended once, for one reason, from any state.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Place(enum.IntEnum):
    """Where a job's KV is."""

    NOWHERE = 0
    """It has none: it is new, or lost what it had."""
    DEVICE = 1
    """On the device, or on its way from there or to there."""
    HOST = 2
    """On the host alone."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, of the model's unmodified distribution) of one generated token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, log-probability) pairs, best first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class JobStats:
    """What ``return_perf_metrics`` shows. Times are of the engine's clock, in seconds."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_preemptions: int
    num_swaps: int
    swap_stall_s: float
    queue_level: int
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class JobOutput:
    """New tokens of one job, or its end. ``finish_reason`` is set exactly once, on the last one."""

    text: str
    """New text: never a broken UTF-8 sequence, never part of a stop word."""
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()
    """One entry a token of ``token_ids`` where the job asked for them, else empty."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Why the engine failed the job (``finish_reason`` ERROR)."""
    refusal: InvalidRequestError | None = None
    """In its place where the request is at fault, which only showed after it was accepted."""
    stats: JobStats | None = None
    """Set with ``finish_reason``."""


OutputSink = Callable[[JobOutput], None]
"""Called on the engine's thread: must return at once and not raise."""


@dataclass(eq=False, slots=True)
class Job:
    """The step loop changes it; the policy ``queue_level`` alone, the KV manager ``num_computed``,
    ``num_shared``, ``place`` and its counts of swaps."""

    id: str
    number: int
    """Order of arrival, unique in one engine; blocks and queues know the job by it."""
    prompt_ids: array[int]
    params: SamplingParams
    arrival_s: float
    sink: OutputSink | None = None
    seed: int = 0
    """The seed in use: ``params.seed`` or a drawn one."""
    predicted_tokens: int | None = None
    """How many output tokens it is predicted to have at its end; None: nobody knows (yet)."""

    state: JobState = JobState.WAITING
    finish_reason: FinishReason | None = None
    """Set when ``state`` is FINISHED."""
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    mask: bytes | None = None
    """With ``params.structured_output``: what the token after ``output_ids`` may be, as in
    ``Sampling.masks``. None: that is not known yet."""
    refusal: InvalidRequestError | None = None
    """See ``JobOutput``."""
    num_pending: int = 0
    """Tokens after those of ``output_ids`` that unfinished steps give it: at most one a step."""
    num_computed: int = 0
    """Tokens, from the first on, whose K and V are in the cache when its unfinished steps end."""
    num_shared: int = 0
    """Tokens after those, whose K and V it copies from other jobs when it runs next; may be out of
    date until then."""
    place: Place = Place.NOWHERE
    """When the KV manager's latest round began."""
    num_cached_tokens: int = 0
    """Of its prompt, those whose K and V other jobs had computed when it first ran."""
    queue_level: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    executed_s: float = 0.0
    """Time of the iterations that it took part in; the rest of its latency is queueing, also where
    an iteration waits for a pipeline stage."""
    num_preemptions: int = 0
    num_swaps: int = 0
    swap_stall_s: float = 0.0
    """Time in which it would have run, had its KV not been on its way."""
    cumulative_logprob: float = 0.0

    @property
    def num_outputs(self) -> int:
        """Output tokens, pending ones too."""
        return len(self.output_ids) + self.num_pending

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.num_outputs

    @property
    def num_ready(self) -> int:
        """Tokens that its next step has not to compute."""
        return self.num_computed + self.num_shared

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run before the next token: 1 in the decode phase, else the rest of the
        prefill."""
        # Asked of thousands of waiting jobs an iteration, so without the properties it is made of.
        num_tokens = len(self.prompt_ids) + len(self.output_ids) + self.num_pending
        return num_tokens - self.num_computed - self.num_shared

    @property
    def waits_for_mask(self) -> bool:
        """Whether it cannot run before a grammar says what its next token may be."""
        return self.params.structured_output is not None and self.mask is None

    @property
    def ended_by_itself(self) -> bool:
        """Its number of output tokens is what such a prompt makes: it was not cancelled, nor cut
        off by ``max_tokens`` (which with ``ignore_eos`` is a length that a load test forces)."""
        return self.finish_reason is FinishReason.STOP or (
            self.finish_reason is FinishReason.LENGTH and self.params.ignore_eos
        )

    def reason_to_end(self, eos_token_ids: Collection[int]) -> FinishReason | None:
        """Why it ends with the last of ``output_ids``; None: it goes on, as far as they tell."""
        token_id, params = self.output_ids[-1], self.params
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token_id in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if len(self.output_ids) >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def sent(self, num_tokens: int) -> None:
        """So many of its uncomputed tokens are in a step from now on."""
        gets_token = num_tokens == self.num_uncomputed
        self.num_computed = self.num_ready + num_tokens
        self.num_shared = 0
        self.num_pending += gets_token

    def lost_ranks(self) -> None:
        """With them its KV is gone, and all steps that were not answered."""
        self.num_computed = self.num_shared = self.num_pending = 0
        self.place = Place.NOWHERE

    def uncomputed_ids(self) -> array[int]:
        """Only while no token is pending."""
        prompt_len = len(self.prompt_ids)
        if self.num_ready >= prompt_len:
            return self.output_ids[self.num_ready - prompt_len :]
        return self.prompt_ids[self.num_ready :] + self.output_ids

    def stats(self) -> JobStats:
        return JobStats(
            arrival_s=self.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
            swap_stall_s=self.swap_stall_s,
            queue_level=self.queue_level,
            num_input_tokens=len(self.prompt_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=len(self.output_ids),
            cumulative_logprob=self.cumulative_logprob,
        )
