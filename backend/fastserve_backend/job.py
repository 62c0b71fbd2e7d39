"""A job: one request inside the engine, and what the engine reports about it."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from fastserve_backend.errors import InvalidRequestError, TenantLimitError
from fastserve_backend.job_trace import JobTrace
from fastserve_backend.logprobs import PromptLogprobs, TokenLogprob
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.token_rules import TokenRules


class JobState(enum.Enum):
    """``WAITING → RUNNING ⇄ PREEMPTED``, and from each of them ``→ FINISHED``.

    WAITING: accepted, and in no step yet. RUNNING: in the latest step. PREEMPTED: in an earlier
    step, but not in the latest one. FINISHED: ended, once and for one reason.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Place(enum.IntEnum):
    """Where a job's KV is."""

    NOWHERE = 0
    """The job has none: it is new, or its KV was dropped."""
    DEVICE = 1
    """On the device, or being copied from it or to it."""
    HOST = 2
    """On the host alone."""


PLACES = tuple(Place)
"""For hot loops: iterating over an enum takes microseconds."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class JobStats:
    """Statistics of a finished job, for ``return_perf_metrics``. Times are seconds of the engine's
    clock."""

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
    """One for each of ``token_ids`` if the job asked for them, else empty."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Why the job failed, if ``finish_reason`` is ERROR."""
    refusal: InvalidRequestError | TenantLimitError | None = None
    """Set if it failed because of its request or its tenant, and the engine found out only after it
    was accepted."""
    stats: JobStats | None = None
    """Set with ``finish_reason``."""
    prompt_logprobs: PromptLogprobs | None = None
    """Set on the output of the first token, if the job asked for them."""


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """How urgent a request is, and whose it is."""

    priority: int = 0
    """Lower runs first."""
    ttft_slo_s: float | None = None
    """Wanted time to the first token, in seconds; None: no objective."""
    tpot_slo_s: float | None = None
    """Wanted time for each later token, in seconds; None: no objective."""
    tenant: str = ""
    """For whom it runs. Requests of "" share one tenant."""
    session_id: str = ""
    """The conversation of this tenant that the request is a turn of; "": of none."""
    cache_salt: str = ""
    """Only jobs with the same salt use each other's KV; "" is the salt of those without one."""

    def with_default_objectives(
        self, ttft_slo_ms: float | None, tpot_slo_ms: float | None
    ) -> ServiceLevel:
        """The same with these objectives, in ms, in place of those that it does not name."""
        ttft_slo_s, tpot_slo_s = self.ttft_slo_s, self.tpot_slo_s
        if ttft_slo_s is None and ttft_slo_ms is not None:
            ttft_slo_s = ttft_slo_ms / 1e3
        if tpot_slo_s is None and tpot_slo_ms is not None:
            tpot_slo_s = tpot_slo_ms / 1e3
        return replace(self, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s)


DEFAULT_SERVICE = ServiceLevel()

OutputSink = Callable[[JobOutput], None]
"""Called on the engine's thread: must return at once and not raise."""


@dataclass(eq=False, slots=True)
class Job:
    """One request inside the engine.

    The step loop changes it, with two exceptions. The policy sets ``queue_level`` and
    ``outranks_all``. The KV manager sets ``num_computed``, ``num_shared``, ``place``,
    ``num_swaps`` and ``swap_stall_s``.
    """

    id: str
    number: int
    """Position in the order of arrival; identifies the job within one engine."""
    prompt_ids: array[int]
    params: SamplingParams
    arrival_s: float
    service: ServiceLevel = DEFAULT_SERVICE
    sink: OutputSink | None = None
    seed: int = 0
    """``params.seed``, or a random number if that is None."""
    num_earlier: int = 0
    """Output tokens that its client has already, from a server that was lost. They are the last of
    ``prompt_ids``: they are computed, charged and counted like a prompt. ``params`` are those of
    the rest of the answer."""
    predicted_tokens: int | None = None
    """Predicted number of output tokens; None if there is no prediction (yet)."""
    session_s: float = 0.0
    """Seconds that the earlier turns of its session would have taken alone; 0 unless it inherits
    its session's age."""
    session_tokens: int = 0
    """Output tokens of those turns."""
    trace: JobTrace | None = None
    """None: nobody traces the job."""

    state: JobState = JobState.WAITING
    finish_reason: FinishReason | None = None
    """Set when ``state`` is FINISHED."""
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    rules: TokenRules | None = None
    """What ``params.allowed_token_ids`` and ``params.bad_words`` say; None: nothing."""
    mask: bytes | None = None
    """The tokens that may follow ``output_ids``, as bits (``Sampling.masks``); None: all may. With
    ``params.structured_output`` it is None until it has been computed."""
    refusal: InvalidRequestError | TenantLimitError | None = None
    """See ``JobOutput``."""
    prompt_logprobs: PromptLogprobs | None = field(init=False, default=None)
    """None: the job did not ask for them."""
    num_pending: int = 0
    """Output tokens that unfinished steps will give it, at most one a step. They come after
    ``output_ids``."""
    num_computed: int = 0
    """Leading tokens whose K and V are in the cache, counting unfinished steps as finished."""
    num_shared: int = 0
    """Tokens after those whose K and V the next step copies from other jobs. Out of date until the
    KV manager has given the job blocks for that step."""
    place: Place = Place.NOWHERE
    """Where its KV was at the start of the KV manager's latest round."""
    num_cached_tokens: int = 0
    """Prompt tokens that it did not compute in its first step, because other jobs had."""
    queue_level: int = 0
    outranks_all: bool = False
    """It starved behind more urgent jobs, and comes before all priorities for a while."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    executed_s: float = 0.0
    """Seconds of the steps that it was in, without waits between pipeline stages. The rest of its
    latency is queueing."""
    num_preemptions: int = 0
    num_swaps: int = 0
    swap_stall_s: float = 0.0
    """Seconds in which it could have run, but waited for a copy of KV."""
    cumulative_logprob: float = 0.0

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = PromptLogprobs(self.prompt_ids, self.params.prompt_logprobs)

    @property
    def earlier_ids(self) -> array[int]:
        """The ``num_earlier`` tokens."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_earlier :]

    @property
    def answer_ids(self) -> array[int]:
        """All output tokens: earlier ones, and its own but for pending ones."""
        return self.earlier_ids + self.output_ids if self.num_earlier else self.output_ids

    @property
    def num_outputs(self) -> int:
        """Output tokens, including pending ones."""
        return len(self.output_ids) + self.num_pending

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.num_outputs

    @property
    def num_ready(self) -> int:
        """Leading tokens that its next step does not have to compute."""
        return self.num_computed + self.num_shared

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run before the next token: 1 in the decode phase, else the rest of the
        prefill."""
        # Called for thousands of waiting jobs in each step: properties would slow it down.
        num_tokens = len(self.prompt_ids) + len(self.output_ids) + self.num_pending
        return num_tokens - self.num_computed - self.num_shared

    @property
    def effective_priority(self) -> float:
        """Its priority; lower than all priorities while it outranks all."""
        return -math.inf if self.outranks_all else self.service.priority

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether it has to compute its prompt itself, even if others have its KV."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.are_sent

    @property
    def waits_for_mask(self) -> bool:
        """Whether it cannot run before its next mask has been computed."""
        return self.params.structured_output is not None and self.mask is None

    @property
    def needs_last_token(self) -> bool:
        """Whether what it may choose next depends on its last token."""
        rules = self.rules
        return self.params.structured_output is not None or (
            rules is not None and rules.depend_on_output
        )

    @property
    def ended_by_itself(self) -> bool:
        """Whether its number of output tokens is typical of its prompt.

        It was neither cancelled nor cut off by ``max_tokens``, and did not begin in the middle of
        its answer. With ``ignore_eos``, ``max_tokens`` is the length that a load test forces on the
        job, and counts as typical.
        """
        return self.num_earlier == 0 and (
            self.finish_reason is FinishReason.STOP
            or (self.finish_reason is FinishReason.LENGTH and self.params.ignore_eos)
        )

    def reason_to_end(self, eos_token_ids: Collection[int]) -> FinishReason | None:
        """Why the job ends with the last of ``output_ids``; None if it goes on.

        Stop words are not looked for here (``TextStream`` does that).
        """
        token_id, params = self.output_ids[-1], self.params
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token_id in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if len(self.output_ids) >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def on_sent(self, num_tokens: int) -> None:
        """A step runs the next ``num_tokens`` of its uncomputed tokens."""
        gets_token = num_tokens == self.num_uncomputed
        self.num_computed = self.num_ready + num_tokens
        self.num_shared = 0
        self.num_pending += gets_token
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.on_sent(self.num_computed)

    def on_token(self, token_id: int, logprob: float, now: float) -> None:
        """The oldest pending token is known."""
        self.num_pending -= 1
        self.output_ids.append(token_id)
        self.cumulative_logprob += logprob
        if self.first_token_s is None:
            self.first_token_s = now
        self.last_token_s = now

    def on_ranks_lost(self) -> None:
        """Its KV is gone with the ranks, and so are its pending tokens."""
        self.num_computed = self.num_shared = self.num_pending = 0
        self.place = Place.NOWHERE
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.on_ranks_lost()
        if self.state is JobState.RUNNING:
            self.state = JobState.PREEMPTED

    def uncomputed_ids(self) -> array[int]:
        """The tokens to run before the next token. No token may be pending."""
        prompt_len = len(self.prompt_ids)
        if self.num_ready >= prompt_len:
            return self.output_ids[self.num_ready - prompt_len :]
        return self.prompt_ids[self.num_ready :] + self.output_ids

    def stats(self) -> JobStats:
        num_input_tokens = len(self.prompt_ids) - self.num_earlier
        return JobStats(
            arrival_s=self.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
            swap_stall_s=self.swap_stall_s,
            queue_level=self.queue_level,
            num_input_tokens=num_input_tokens,
            num_cached_tokens=min(self.num_cached_tokens, num_input_tokens),
            num_output_tokens=len(self.output_ids),
            cumulative_logprob=self.cumulative_logprob,
        )
