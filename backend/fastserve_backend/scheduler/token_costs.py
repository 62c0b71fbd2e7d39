"""What the tokens of tenants cost, from the latency profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, IterationTimes


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Seconds of the machine that a token costs in a full batch: only then does anybody wait.

    A decode alone takes nearly as long as a batch of decodes. So its own time (``own_time_s``)
    would make an output token a hundred times as dear as a prompt token.
    """

    prompt_token_s: float
    output_token_s: float
    context_token_s: float
    """For each token that an output token attends to."""
    scored_token_s: float
    """For the log-probabilities of a prompt token."""

    @classmethod
    def of(cls, limits: BatchLimits, times: IterationTimes, max_model_len: int) -> Self:
        most_tokens = min(limits.job_tokens, max_model_len)
        shortest_s = times.decodes_s(limits.max_seqs, 1) / limits.max_seqs
        longest_s = times.decodes_s(limits.max_seqs, max_model_len) / limits.max_seqs
        return cls(
            times.prefill_s(most_tokens) / most_tokens,
            shortest_s,
            max(0.0, longest_s - shortest_s) / max_model_len,
            times.score_s(most_tokens) / most_tokens,
        )

    def output_s(self, num_tokens: int, context_tokens: int) -> float:
        """The cost of output tokens that attend to so many tokens each."""
        return num_tokens * (self.output_token_s + self.context_token_s * context_tokens)

    def seconds(self, job: Job, num_tokens: int) -> float:
        """The cost of the last ``num_tokens`` tokens that the job has computed."""
        if num_tokens == 1:
            return self.output_s(1, job.num_computed)
        prompt_s = self.prompt_token_s * num_tokens
        if job.prompt_logprobs is None:
            return prompt_s
        return prompt_s + self.scored_token_s * job.prompt_logprobs.num_latest
