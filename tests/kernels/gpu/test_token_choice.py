"""The choice of tokens against its float64 reference, and its distribution: on a GPU, or in the
interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from case_shapes import but_dtype
from choice_cases import Rule, cases, chosen, sampling_of
from emulated_gpu import DEVICE, emulated_gpu
from fastserve_backend.worker.token_choice import RowRules
from fastserve_kernels.gpu import token_choice
from kernel_cases import Case


@pytest.mark.one_of("case", key=but_dtype)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_case(case: Case, kernel_device: torch.device) -> None:
    for comparison in case.run(kernel_device):
        assert comparison.error <= comparison.limit, comparison.what


def test_tokens_are_as_frequent_as_likely(kernel_device: torch.device) -> None:
    """Pearson's statistic, below what a right choice exceeds once in a thousand times."""
    shares = np.array([0.3, 0.05, 0.25, 0.1, 0.2, 0.1])
    kept = shares >= 0.2  # 0.3 + 0.25 < 0.7 < 0.3 + 0.25 + 0.2
    rows = 100
    logits = torch.from_numpy(np.log(shares)).float().expand(rows, -1)
    uniform = np.random.default_rng(3).random(rows)
    tokens, _ = chosen(logits, [Rule(top_p=0.7)] * rows, uniform, kernel_device)
    counts = np.bincount(tokens.numpy(), minlength=len(shares))
    assert counts[~kept].sum() == 0
    expected = rows * shares[kept] / shares[kept].sum()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 13.8


def test_a_graph_chooses_anew() -> None:
    """The choice can be captured: it waits for nothing, and its arrays keep their addresses."""
    rules = [Rule(), Rule(top_p=0.9), Rule(top_k=5), Rule(temperature=0.0)]
    uniform = [0.2, 0.9, 0.5, 0.0]
    first, second = torch.randn(2, 4, 300, generator=torch.Generator().manual_seed(1))
    expected, _ = chosen(second, rules, uniform, torch.device("cpu"))
    with emulated_gpu() as gpu:
        scores = first.to(DEVICE)
        words = torch.from_numpy(RowRules(sampling_of(rules, uniform), 300).words()).to(DEVICE)
        gpu.waits.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, answers = token_choice.choose_tokens(scores, words, filters=True, no_token=-1)
        assert gpu.waits == []
        scores.copy_(second.to(DEVICE))
        graph.replay()
        assert answers.cpu().tolist() == expected.tolist()
