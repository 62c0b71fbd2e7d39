"""What a load test records of one job."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_bench.workload.service_class import NO_CLASS, ServiceClass


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A finished job. Times are seconds of one clock; ``None`` means unknown.

    A client sees when tokens come. Only the server, or a simulation, knows the rest.

    Raises:
        ValueError: times out of order, or no tokens. The recording code is wrong then.
    """

    arrival_s: float
    first_scheduled_s: float | None
    """Start of the job's first iteration."""
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int | None = None
    executed_s: float | None = None
    """Time of all iterations of the job."""
    swap_stall_s: float | None = None
    """Time in which it did not run because its KV was not on the device."""
    alone_s: float | None = None
    """Its latency on an idle system."""
    service: ServiceClass = NO_CLASS

    def __post_init__(self) -> None:
        scheduled_s = self.arrival_s if self.first_scheduled_s is None else self.first_scheduled_s
        # In this form NaN fails too.
        if not (
            self.arrival_s <= scheduled_s <= self.first_token_s <= self.last_token_s
            and self.arrival_s < self.last_token_s
        ):
            raise ValueError(f"times of a job must ascend: {self}")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"a job has at least one token of prompt and of output: {self}")
        durations = (self.executed_s or 0.0, self.swap_stall_s or 0.0)
        if not all(one >= 0 for one in durations) or not (self.alone_s is None or self.alone_s > 0):
            raise ValueError(f"durations of a job must not be negative: {self}")

    @property
    def latency_s(self) -> float:
        """Job completion time (JCT): from arrival to the last token."""
        return self.last_token_s - self.arrival_s

    @property
    def normalized_latency_s(self) -> float:
        """Latency per output token (FastServe §6.1), waiting included. It is not TPOT."""
        return self.latency_s / self.output_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time from one output token to the next; ``None`` for a single token."""
        if self.output_tokens == 1:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def queueing_s(self) -> float | None:
        """The part of the latency in which no iteration ran the job, at first or later."""
        if self.executed_s is None:
            return None
        return min(max(self.latency_s - self.executed_s, 0.0), self.latency_s)

    @property
    def queueing_share(self) -> float | None:
        """The share of the latency spent waiting, 0 … 1 (FastServe Fig. 1)."""
        return None if self.queueing_s is None else self.queueing_s / self.latency_s
