"""Log-probabilities of tokens: those of an answer, and those of a whole prompt."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastserve_backend.rank_protocol.messages import PromptScores


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural, of the model's unmodified distribution) of one token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, log-probability) pairs, best first, as many as requested."""
    rank: int | None = None
    """1 if no token is likelier, and so on; only for tokens of a prompt."""


class PromptLogprobs:
    """What is known about a prompt's tokens but the first, for which nothing is to know.

    The step loop fills it, chunk by chunk, before the job's first token. Any thread may read it
    after that. Only the model's numbers are kept: a long prompt may have a million.
    """

    def __init__(self, prompt_ids: array[int], num_top: int) -> None:
        self.num_top = num_top
        """How many of the most likely tokens are listed at each place."""
        self.num_latest = 0
        """Rows of logits that the job's latest step computes for it."""
        self._prompt_ids = prompt_ids
        self._num_sent = self._num_known = 0
        self._scores: list[PromptScores] = []

    @property
    def are_sent(self) -> bool:
        """Whether all are known, or will be with unfinished steps."""
        return self._num_sent == len(self._prompt_ids) - 1

    def rows(self, start: int, count: int) -> range:
        """The positions among the ``count`` from ``start`` on whose logits are wanted. The logits
        at a position say how likely the next token is. A job that computes its KV again asks for no
        row twice."""
        assert start <= self._num_sent or self.are_sent, "a prefix of the prompt was not computed"
        begin = max(start, self._num_sent)
        return range(begin, max(begin, min(start + count, len(self._prompt_ids) - 1)))

    def on_sent(self, num_computed: int) -> None:
        """A step was sent that computes the first ``num_computed`` tokens, or the last of them."""
        num_sent = max(self._num_sent, min(num_computed, len(self._prompt_ids) - 1))
        self.num_latest = num_sent - self._num_sent
        self._num_sent = num_sent

    def on_scores(self, scores: PromptScores) -> None:
        """A step has ended. Steps end in the order in which they were sent."""
        self._scores.append(scores)
        self._num_known += len(scores.ranks) // np.dtype(np.int32).itemsize

    def on_ranks_lost(self) -> None:
        """Unfinished steps will not end."""
        self._num_sent = self._num_known

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        """An entry for each token of the prompt; None for the first. All must be known."""
        yield None
        token_ids = iter(self._prompt_ids[1:])
        for scores in self._scores:
            logprobs = np.frombuffer(scores.logprobs, dtype=np.float32).tolist()
            ranks = np.frombuffer(scores.ranks, dtype=np.int32).tolist()
            shape = len(ranks), self.num_top
            top_ids = np.frombuffer(scores.top_ids, dtype=np.int32).reshape(shape)
            top_logprobs = np.frombuffer(scores.top_logprobs, dtype=np.float32).reshape(shape)
            for row, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
                top = zip(top_ids[row].tolist(), top_logprobs[row].tolist(), strict=True)
                yield TokenLogprob(next(token_ids), logprob, tuple(top), rank)
