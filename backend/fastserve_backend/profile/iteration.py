"""The work in one iteration, and the interface for predicting how long it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastserve_backend.rank_protocol.messages import Step


@dataclass(frozen=True, slots=True)
class IterationLoad:
    """The work in one iteration: any mix of decodes, prefills and chunks of prefills."""

    num_tokens: int
    """Tokens of all jobs: rows through the linear layers."""
    num_sampled: int
    """Jobs that get a new token: rows through the LM head."""
    num_decodes: int
    """Jobs that run one token."""
    decode_context: int
    """Sum of the positions that those tokens attend to, including their own."""
    prefill_pairs: int
    """Pairs of a prefill's token and a position that it attends to. A prefill of n tokens after
    ``start`` cached ones has n·start + n(n+1)/2."""

    @classmethod
    def of(cls, slices: Iterable[tuple[int, int, bool]]) -> IterationLoad:
        """From each job's (tokens in the cache, tokens to run, whether it gets a token)."""
        num_tokens = num_sampled = num_decodes = decode_context = prefill_pairs = 0
        for start, count, samples in slices:
            num_tokens += count
            num_sampled += samples
            if count == 1:
                num_decodes += 1
                decode_context += start + 1
            else:
                prefill_pairs += count * start + count * (count + 1) // 2
        return cls(num_tokens, num_sampled, num_decodes, decode_context, prefill_pairs)

    @classmethod
    def of_step(cls, step: Step) -> IterationLoad:
        counts = array("i", step.query_lens)
        num_sampling = len(counts) - step.num_partial
        return cls.of(
            (start, count, row < num_sampling)
            for row, (start, count) in enumerate(zip(array("i", step.starts), counts, strict=True))
        )


class LatencyModel(ABC):
    """Predicts iteration times: the job profiler of FastServe §4.1."""

    num_stages: int = 1
    """Pipeline stages; a batch spends an equal share of its time in each."""

    @abstractmethod
    def iteration_s(self, load: IterationLoad) -> float:
        """Seconds from sending a batch to the first stage until its tokens are known; > 0."""

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of an iteration that runs one whole prompt of ``num_tokens`` tokens alone."""
        return self.iteration_s(IterationLoad.of([(0, num_tokens, True)]))

    def decode_s(self, context_tokens: int) -> float:
        """Seconds of an iteration that decodes one job alone, attending to ``context_tokens``."""
        return self.iteration_s(IterationLoad.of([(context_tokens - 1, 1, True)]))

    def decodes_s(self, num_jobs: int, context_tokens: int) -> float:
        """Seconds of an iteration that decodes ``num_jobs`` jobs, each attending to
        ``context_tokens``."""
        return self.iteration_s(IterationLoad.of([(context_tokens - 1, 1, True)] * num_jobs))

    def score_s(self, num_tokens: int) -> float:
        """Seconds that the log-probabilities of so many prompt tokens take, beside the tokens.

        Here they are as many more rows through the LM head. A measured profile knows better. They
        are not learned while serving: beside other processes, what an iteration takes longer for
        other reasons would count as their cost, and chunks would shrink without end.
        """
        plain = IterationLoad.of([(0, num_tokens, True)])
        scored = replace(plain, num_sampled=num_tokens + 1)
        return self.iteration_s(scored) - self.iteration_s(plain)
