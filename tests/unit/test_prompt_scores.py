"""Log-probabilities of prompts, computed together with the logits of the rows that get a token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fastserve_backend.rank_protocol.messages import PromptRows
from fastserve_backend.worker import prompt_scores
from fastserve_backend.worker.prompt_scores import score_prompts
from torch import Tensor

VOCAB, WIDTH, TOP = 50, 8, 3


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("sampled", [[], [0], [0, 1, 11]])
def test_rows_are_scored_and_sampled_whatever_fits_at_once(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int, sampled: list[int]
) -> None:
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", rows_at_once * VOCAB)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(12, WIDTH, generator=generator)
    head = torch.randn(WIDTH, VOCAB, generator=generator)
    asked = [
        PromptRows(1, 2, np.arange(4, dtype=np.int32).tobytes(), TOP),
        PromptRows(2, 7, np.arange(3, dtype=np.int32).tobytes(), 1),
    ]
    calls: list[int] = []

    def logits_of(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return rows @ head

    prompts, logits = score_prompts(hidden, asked, torch.tensor(sampled).long(), logits_of, VOCAB)
    if sampled:
        assert logits is not None
        torch.testing.assert_close(logits, hidden[sampled] @ head)
    else:
        assert logits is None
    assert max(calls) <= max(rows_at_once, len(sampled))
    if rows_at_once == 100:
        assert calls == [7 + len(sampled)]  # the head is read once
    assert prompts is not None
    for one, scores in zip(asked, prompts.on_host(), strict=True):
        rows = slice(one.first_row, one.first_row + one.num_rows)
        exact = (hidden[rows] @ head).log_softmax(-1)
        ids = torch.arange(one.num_rows)
        own = exact[ids, ids]
        top, top_ids = exact.topk(one.num_top)
        got = torch.from_numpy(np.frombuffer(scores.logprobs, np.float32).copy())
        torch.testing.assert_close(got, own)
        assert np.frombuffer(scores.ranks, np.int32).tolist() == [
            1 + int((row > value).sum()) for row, value in zip(exact, own, strict=True)
        ]
        assert np.frombuffer(scores.top_ids, np.int32).tolist() == top_ids.flatten().tolist()
        got = torch.from_numpy(np.frombuffer(scores.top_logprobs, np.float32).copy())
        torch.testing.assert_close(got, top.flatten())


def test_ranks_without_logits_have_nothing() -> None:
    asked = [PromptRows(0, 0, bytes(4), TOP)]
    scores = score_prompts(
        torch.zeros(2, WIDTH), asked, torch.tensor([1]), lambda rows: None, VOCAB
    )
    assert scores == (None, None)
