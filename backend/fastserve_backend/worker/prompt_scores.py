"""Log-probabilities of the tokens of prompts, from the hidden states of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.rank_protocol.messages import PromptRows, PromptScores
from fastserve_backend.worker.sampler import start_copy
from fastserve_backend.worker.staging import Uploads
from fastserve_backend.worker.token_choice import of_tokens

# The LM head computes so many logits at once. In float32 they take 64 MiB, and all that is computed
# from them 200 MiB, however long the prompts are. More would leave less memory for KV. With fewer,
# a large vocabulary would leave the head's product too few rows to use a processor well.
MOST_LOGITS = 1 << 24


class ScoredPrompts:
    """The log-probabilities of a step, on their way to the host.

    Keep it until the device has finished: it holds the memory of the copies.
    """

    def __init__(self, asked: Sequence[PromptRows], scores: Sequence[Tensor], uploads: Uploads):
        """
        Args:
            scores: of all rows that are asked for, N, one job after the other: log-probabilities
                [N] and ranks [N] of the tokens, most likely tokens [N, k] and theirs [N, k].
            uploads: host memory that the computation still reads.
        """
        self._asked = asked
        self._uploads = uploads
        self._on_host = start_copy(scores)

    def on_host(self) -> list[PromptScores]:
        """Call this only when the device has finished."""
        logprobs, ranks, top_ids, top_logprobs = (one.numpy() for one in self._on_host)
        ends = np.cumsum([0, *(one.num_rows for one in self._asked)])
        return [
            PromptScores(
                logprobs[begin:end].tobytes(),
                ranks[begin:end].tobytes(),
                top_ids[begin:end, : one.num_top].tobytes(),
                top_logprobs[begin:end, : one.num_top].tobytes(),
            )
            for one, (begin, end) in zip(self._asked, pairwise(ends), strict=True)
        ]


class StepScores(NamedTuple):
    """What a step that scores prompts computes of its hidden states."""

    prompts: ScoredPrompts | None
    """None on ranks that get no logits."""
    sampled: Tensor | None
    """Logits of the rows that get a token, [R, vocab]. None if there are no such rows, and on ranks
    that get no logits."""


def score_prompts(
    hidden: Tensor,
    asked: Sequence[PromptRows],
    sampled: Tensor,
    logits_of: Callable[[Tensor], Tensor | None],
    vocab_size: int,
) -> StepScores:
    """All ranks of the last stage must call this.

    Args:
        hidden: the last stage's hidden states, [T, width].
        asked: at least one.
        sampled: int64 [R], the rows that get a token. The LM head is read for them and for the
            first rows of prompts together, because reading it takes longest in a small step.
        logits_of: the model's: hidden states [R, width] -> logits [R, vocab] of any float type.
    """
    uploads = Uploads(hidden.device)
    rows = [np.arange(one.first_row, one.first_row + one.num_rows) for one in asked]
    index = uploads.bring(np.concatenate(rows))
    token_ids = np.frombuffer(b"".join(one.token_ids for one in asked), dtype=np.int32)
    targets = uploads.bring(token_ids.astype(np.int64))
    num_top = max(one.num_top for one in asked)
    rows_at_once = max(1, MOST_LOGITS // vocab_size)
    num_sampled = len(sampled)
    num_first = min(max(0, rows_at_once - num_sampled), len(index))
    first_rows = torch.cat([sampled, index[:num_first]])
    first = logits_of(ops.lookup_rows(hidden, first_rows)) if len(first_rows) else None
    sampled_logits = None if first is None or not num_sampled else first[:num_sampled]
    parts = []
    if first is not None and num_first:
        parts.append(_scores(first[num_sampled:], targets[:num_first], num_top))
    for begin in range(num_first, len(index), rows_at_once):
        some = slice(begin, begin + rows_at_once)
        logits = logits_of(ops.lookup_rows(hidden, index[some]))
        if logits is not None:
            parts.append(_scores(logits, targets[some], num_top))
    if not parts:
        return StepScores(None, sampled_logits)
    scores = [torch.cat(of_parts) for of_parts in zip(*parts, strict=True)]
    return StepScores(ScoredPrompts(asked, scores, uploads), sampled_logits)


def _scores(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, ...]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = of_tokens(logprobs, token_ids)
    ranks = (logprobs > own[:, None]).sum(dim=-1) + 1
    top_logprobs, top_ids = torch.topk(logprobs, num_top)
    return own, ranks.int(), top_ids.int(), top_logprobs
