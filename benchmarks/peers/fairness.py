"""What makes a comparison fair: all compute the same, and an idle one takes no processor time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import psutil

from benchmarks.peers.comparison_tables import markdown

CHECKED_TOKENS = 16
_CHECKED_PROMPTS, _PROMPT_TOKENS = 4, 32
_FIRST_TOKEN_ID = 300
_MOST_IDLE_CPU = 0.03
_IDLE_S = 5.0
_SETTLE_S = 3.0
"""vLLM's worker spins for a while after its last step before it waits."""


def checked_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts whose greedy answers of ``CHECKED_TOKENS`` tokens are compared."""
    rng = np.random.default_rng(0)
    shape = (_CHECKED_PROMPTS, _PROMPT_TOKENS)
    prompts: list[list[int]] = rng.integers(_FIRST_TOKEN_ID, vocab_size, shape).tolist()
    return prompts


def idle_cpu(pids: Mapping[str, int]) -> dict[str, float]:
    """Cores that each idle process takes with its children, by label."""
    time.sleep(_SETTLE_S)
    before = {label: _cpu_s(pid) for label, pid in pids.items()}
    time.sleep(_IDLE_S)
    return {label: (_cpu_s(pid) - before[label]) / _IDLE_S for label, pid in pids.items()}


def fairness_table(
    answers: Mapping[str, Sequence[Sequence[int]]], idle: Mapping[str, float]
) -> str:
    """How many tokens of the answers equal those of the first label's before the first difference,
    on average, and what each takes when idle, as Markdown.

    All read the same weights, but rounding may part two texts at any token.

    Raises:
        RuntimeError: one takes processor time while idle.
    """
    busy = [label for label, cores in idle.items() if cores > _MOST_IDLE_CPU]
    if busy:
        raise RuntimeError(
            f"idle, {busy[0]} takes {idle[busy[0]]:.0%} of a core, more than "
            f"{_MOST_IDLE_CPU:.0%}: those beside it would be slower for it"
        )
    first, reference = next(iter(answers.items()))
    rows = []
    for label, texts in answers.items():
        same = np.mean([_common(*pair) for pair in zip(reference, texts, strict=True)])
        rows.append([label, f"{same:.1f}", f"{idle[label]:.1%}"])
    header = ["", f"greedy tokens as {first}'s, of {CHECKED_TOKENS}", "idle, of a core"]
    return markdown(header, rows)


def _cpu_s(pid: int) -> float:
    """CPU time of a process and its children so far."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of tokens before the first that differs."""
    differs = [a != b for a, b in zip(left, right, strict=True)]
    return differs.index(True) if True in differs else len(differs)
