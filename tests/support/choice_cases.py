"""Cases of the choice of tokens, for a CPU's implementation and a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kernel_reference as reference
import numpy as np
import torch
from fastserve_backend.rank_protocol.messages import Sampling
from fastserve_backend.worker.staging import Uploads
from fastserve_backend.worker.token_choice import choose
from kernel_cases import DTYPES, NAN, Case, Comparison
from torch import Tensor

INFINITY = float("inf")
NO_TOKEN = -1
LIMIT = 1e-5
"""By how much of all tokens' weight a choice may be off, because weights are rounded."""


@dataclass(frozen=True)
class Rule:
    """How a row chooses. temperature: 0 = greedy; top_k: 0 = all."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Rule(temperature=0.0)
RULES = [
    Rule(), GREEDY, Rule(top_p=0.9), Rule(top_k=1), Rule(top_k=50, top_p=0.8), Rule(min_p=0.05),
    Rule(temperature=0.3, top_p=0.5), Rule(temperature=100.0, top_k=9), Rule(top_p=1e-40),
    Rule(temperature=2.0, top_k=10**6, top_p=0.9999), Rule(temperature=1e-5, top_p=0.9),
    Rule(top_k=2, top_p=0.999, min_p=1.0), Rule(temperature=100.0, top_p=0.4, min_p=0.5),
]  # fmt: skip


def _ascending(rows: int, vocab: int) -> Tensor:
    return torch.linspace(-9, 9, vocab).expand(rows, -1)


def _masked(rows: int, vocab: int) -> Tensor:
    scores = torch.randn(rows, vocab)
    return scores.where(torch.rand(rows, vocab) < 0.02, -INFINITY).index_fill(
        1, torch.tensor(vocab // 2), 0.5
    )


def _one_allowed(rows: int, vocab: int) -> Tensor:
    return torch.full((rows, vocab), -INFINITY).index_fill_(1, torch.tensor(vocab - 1), -3.0)


def _zeros_of_both_signs(rows: int, vocab: int) -> Tensor:
    return torch.randint(2, (rows, vocab)).float() * -0.0


# Scores and sizes of a vocabulary: of one tile of a kernel and of several, and of both.
SCORES: dict[str, tuple[Callable[[int, int], Tensor], int]] = {
    "flat": (torch.randn, 5000),
    "peaked": (lambda rows, vocab: torch.randn(rows, vocab) * 6, 4200),
    "of few values": (lambda rows, vocab: torch.randint(4, (rows, vocab)).float(), 2500),
    "all equal": (lambda rows, vocab: torch.full((rows, vocab), -7.5), 4097),
    "ascending": (_ascending, 900),
    "masked": (_masked, 700),
    "one allowed": (_one_allowed, 40),
    "zeros of both signs": (_zeros_of_both_signs, 300),
    "large": (lambda rows, vocab: torch.randn(rows, vocab) * 1e30, 64),
    "two tokens": (torch.randn, 2),
    "one token": (torch.randn, 1),
}


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for name in SCORES:
            if not (name == "large" and dtype == torch.float16):
                yield Case("choose_tokens", (dtype, name), _choices)
        yield Case("choose_tokens", (dtype, "bad scores"), _choices_of_bad_scores)


def sampling_of(rules: list[Rule], uniform: Any) -> Sampling:
    def column(name: str, dtype: str) -> bytes:
        return np.array([getattr(rule, name) for rule in rules], dtype).tobytes()

    return Sampling(
        temperature=column("temperature", "f4"),
        top_k=column("top_k", "i4"),
        top_p=column("top_p", "f4"),
        uniform=np.array(uniform, "f8").tobytes(),
        no_eos=bytes(len(rules)),
        num_logprobs=np.full(len(rules), -1, "i4").tobytes(),
        penalties=[],
        min_p=column("min_p", "f4"),
    )


def chosen(
    scores: Tensor, rules: list[Rule], uniform: Any, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The results of `choose`, on the host."""
    uploads = Uploads(device)
    tokens, answers = choose(scores.to(device), sampling_of(rules, uniform), uploads)
    return tokens.cpu(), answers.cpu()


def _choices(dtype: torch.dtype, name: str, device: torch.device) -> Iterator[Comparison]:
    make, vocab = SCORES[name]
    # Rows of a wider tensor, as of logits with padding.
    wide = torch.full((len(RULES), vocab + 16), NAN, dtype=dtype)
    wide[:, :vocab] = make(len(RULES), vocab)
    uniform = [*torch.rand(len(RULES) - 3, dtype=torch.float64).tolist(), 0.0, 0.5, 1 - 2**-53]
    tokens, answers = chosen(wide.to(device)[:, :vocab], RULES, uniform, device)
    yield Comparison("answers", answers, tokens)
    of_cpu = wide[:, :vocab].float()
    errors = [
        reference.error_of_choice(
            scores, int(token), rule.temperature, rule.top_k, rule.top_p, rule.min_p, point
        )
        for scores, token, rule, point in zip(of_cpu, tokens, RULES, uniform, strict=True)
    ]
    right = torch.ones(len(RULES), dtype=torch.float64)
    yield Comparison("tokens", right + torch.tensor(errors), right, LIMIT)
    for row in (2, 4):  # alone, a row gets the same token
        scores = wide.to(device)[row : row + 1, :vocab]
        alone, _ = chosen(scores, [RULES[row]], [uniform[row]], device)
        yield Comparison(f"row {row} alone", alone, tokens[row : row + 1])


def _choices_of_bad_scores(
    dtype: torch.dtype, name: str, device: torch.device
) -> Iterator[Comparison]:
    rules = [GREEDY, Rule(), Rule(top_p=0.9), Rule(top_k=3), Rule(min_p=0.5)]
    uniform = [0.3] * len(rules)
    for what, bad in [("NaN", NAN), ("negative NaN", -NAN), ("infinity", INFINITY)]:
        scores = torch.randn(len(rules), 60).to(dtype)
        scores[:, 17] = bad
        tokens, answers = chosen(scores, rules, uniform, device)
        expected = torch.full((len(rules),), NO_TOKEN)
        if bad == INFINITY:
            expected[0] = 17
        yield Comparison(what, answers, expected)
        yield Comparison(f"{what}, in the vocabulary", tokens.clamp(0, 59), tokens)
    scores = torch.full((len(rules), 60), -INFINITY).to(dtype)
    tokens, answers = chosen(scores, rules, uniform, device)
    yield Comparison("none allowed", answers, torch.tensor([0] + [NO_TOKEN] * (len(rules) - 1)))
    yield Comparison("none allowed, in the vocabulary", tokens.clamp(0, 59), tokens)
