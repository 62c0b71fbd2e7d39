"""Steps of a few jobs, each sent after the previous step's tokens, or ahead of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastserve_backend.rank_protocol.messages import (
    LogitBias,
    Penalties,
    Sampling,
    Step,
    StepResult,
)

BLOCK_SIZE = 16
PROMPTS = [[17 + 3 * job + 5 * place for place in range(n)] for job, n in enumerate((5, 9, 20, 18))]
BLOCKS = [[4, 7], [1, 0], [6, 2], [5, 3]]
"""Blocks of each job."""
NUM_BLOCKS = 8
NOT_KNOWN = -1
"""Stands in a step for a token that only the rank knows."""
PENALISED = (1, 3)
MASKED = (0, 3)
BIASED = 2
Launch = Callable[[Step], Callable[[], StepResult]]


@dataclass(frozen=True)
class Turn:
    """The jobs of a step, in its order."""

    decoding: tuple[int, ...] = ()
    ending: tuple[int, ...] = ()
    """Jobs whose prefill ends."""
    chunk: tuple[int, int] | None = None
    """A job whose prefill continues later, and the number of tokens that run now."""


TURNS = [
    Turn(ending=(0, 1)),
    Turn(decoding=(1, 0), chunk=(2, 7)),
    Turn(chunk=(2, 9)),
    Turn(decoding=(0, 1), ending=(2,), chunk=(3, 16)),
    Turn(decoding=(2, 0), ending=(3,)),
    Turn(decoding=(3, 1, 2)),  # 1 had no token in the step before, 0 leaves
    Turn(decoding=(2, 3)),
    Turn(decoding=(0, 3, 2, 1)),
    Turn(decoding=(1, 2, 0)),
]


def run_turns(
    launch: Launch,
    *,
    ahead: bool,
    sampled: bool = True,
    masked_vocab: int | None = None,
    computed: bool = True,
) -> list[StepResult]:
    """
    Args:
        launch: begins a step; returns a function that waits for its result.
        ahead: launches each step before it waits for the previous result.
        sampled: half of the jobs are sampled with penalties, some with log-probabilities. If false,
            all are greedy.
        masked_vocab: size of the vocabulary. Masked jobs may choose every third token, and a biased
            job always chooses the last. None: no masks and biases.
        computed: false if the ranks compute nothing, and so all outputs may be alike.
    """
    done = [0] * len(PROMPTS)
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    chosen: list[int] = []  # the jobs of the previous step that get a token
    results: list[StepResult] = []
    unanswered: list[Callable[[], StepResult]] = []

    def take(jobs: Sequence[int], answer: Callable[[], StepResult]) -> None:
        results.append(answer())
        for job, token in zip(jobs, np.frombuffer(results[-1].token_ids, np.int32), strict=True):
            outputs[job][-1] = int(token)

    for step_id, turn in enumerate(TURNS):
        parts = [(job, outputs[job][-1:]) for job in turn.decoding]
        parts += [(job, PROMPTS[job][done[job] :]) for job in turn.ending]
        if turn.chunk is not None:
            job, count = turn.chunk
            parts.append((job, PROMPTS[job][done[job] : done[job] + count]))
        jobs = [*turn.decoding, *turn.ending]
        in_step = [
            (done[job], tokens, BLOCKS[job][: -(-(done[job] + len(tokens)) // BLOCK_SIZE)])
            for job, tokens in parts
        ]
        step = Step.of(step_id, in_step, num_partial=len(parts) - len(jobs))
        if ahead and step_id > 0:
            rows = [chosen.index(job) if job in chosen else -1 for job in turn.decoding]
            step.previous_rows = _ints(rows)
        if sampled and jobs:
            step.sampling = _sampling([(job, outputs[job]) for job in jobs])
            if masked_vocab is not None:
                _bound(step.sampling, jobs, masked_vocab)
        unanswered.append(launch(step))
        if ahead and step_id > 0:
            take(chosen, unanswered.pop(0))
        for job, tokens in parts:
            done[job] += len(tokens)
        chosen = jobs
        for job in jobs:
            outputs[job].append(NOT_KNOWN)
        if not ahead:
            take(chosen, unanswered.pop(0))
    if ahead:
        take(chosen, unanswered.pop(0))
    assert not computed or len({tuple(tokens) for tokens in outputs}) == len(outputs)
    assert [result.step_id for result in results] == list(range(len(TURNS)))
    return results


def _sampling(rows: Sequence[tuple[int, list[int]]]) -> Sampling:
    """Rows are (job, its output)."""

    def column(dtype: Any, of_jobs: Sequence[Any]) -> bytes:
        return np.array([of_jobs[job] for job, _ in rows], dtype).tobytes()

    uniform = [random.Random(100 * job + len(output)).random() for job, output in rows]
    return Sampling(
        temperature=column(np.float32, [0.0, 1.0, 0.0, 1.5]),
        top_k=column(np.int32, [0, 0, 0, 40]),
        top_p=column(np.float32, [1.0, 1.0, 1.0, 0.9]),
        uniform=np.array(uniform).tobytes(),
        no_eos=column(np.bool_, [False] * 4),
        num_logprobs=column(np.int32, [-1, 0, 2, 3]),
        penalties=[
            Penalties(
                row=row,
                repetition=0.5,
                presence=-0.3,
                frequency=-0.2,
                prompt_ids=_ints(PROMPTS[job]),
                output_ids=_ints([token for token in output if token != NOT_KNOWN]),
                is_pending=NOT_KNOWN in output,
            )
            for row, (job, output) in enumerate(rows)
            if job in PENALISED
        ],
        min_p=column(np.float32, [0.0, 0.05, 0.0, 0.02]),
    )


def _bound(sampling: Sampling, jobs: Sequence[int], vocab: int) -> None:
    rows = [row for row, job in enumerate(jobs) if job in MASKED]
    may = np.arange(-(-vocab // 32) * 32) % 3 == 0
    sampling.masked_rows = _ints(rows)
    sampling.masks = np.packbits(may, bitorder="little").tobytes() * len(rows)
    sampling.biases = [
        LogitBias(row, _ints([vocab - 1]), np.array([1000.0], np.float32).tobytes())
        for row, job in enumerate(jobs)
        if job == BIASED
    ]


def _ints(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()
