"""A job that decodes beside others with the same beginning gets the logits that it gets alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checkpoints import VARIANTS as DECODERS
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.loader import load_model
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.worker.kv_store import allocate_kv
from fastserve_backend.worker.step_inputs import CPUInputs, StepLimits
from fastserve_backend.worker.step_program import StepProgram
from rotary_checkpoints import VARIANTS as ROTARY
from rotary_checkpoints import random_model
from torch import Tensor

pytestmark = pytest.mark.usefixtures("compiled_kernels")

BLOCK_SIZE, BLOCKS_OF_A_JOB, POSITIONS = 4, 64, 256
COMMON = 144
"""First tokens that all jobs have in the blocks of job 0."""
OWN = (3, 40, 9, 1, 75, 20)
"""Tokens of each job behind them."""
CPU = torch.device("cpu")


def tokens_of(job: int, first: int, end: int) -> list[int]:
    return [
        (11 * position + (7 * job if position >= COMMON else 0)) % 300
        for position in range(first, end)
    ]


class Jobs:
    """Jobs that share blocks, in a recorded program of a model."""

    def __init__(self, directory: Path, **options: Any) -> None:
        config = load_model_config(str(directory), load_format="auto", **options)
        groups = config.layer_groups
        self._kinds = groups.kinds
        self._num_groups = len(groups.kind_of_group)
        num_blocks = len(OWN) * BLOCKS_OF_A_JOB * self._num_groups
        kv = allocate_kv(config, CPU, BLOCK_SIZE, num_blocks, 0.9)
        kv.zero_()
        limits = StepLimits(len(OWN), POSITIONS, POSITIONS)
        self._prepare = CPUInputs(BLOCK_SIZE, groups.kinds).prepare
        model = load_model(config, CPU)
        self._memory = model, kv  # the program has their addresses only
        self._program = StepProgram(
            model,
            kv,
            limits,
            self._num_groups,
            width=config.hidden_size,
            dtype=kv.dtype if kv.dtype != torch.int8 else torch.bfloat16,
            has_earlier_stage=False,
            is_last_stage=True,
        )
        self._run([(0, 0, COMMON)])
        for job, own in enumerate(OWN):
            self._run([(job, COMMON, COMMON + own)])

    def decode(self, jobs: Sequence[int]) -> Tensor:
        """The logits of each job's next token."""
        return self._run([(job, COMMON + OWN[job], COMMON + OWN[job] + 1) for job in jobs])

    def _run(self, spans: list[tuple[int, int, int]]) -> Tensor:
        """The logits of each job's last token. Spans are (job, first position, end)."""
        rows: list[Any] = []
        for job, first, end in spans:
            tables, first_group = [], 0
            for kind in self._kinds:
                groups = range(first_group, first_group + kind.num_groups)
                first_group += kind.num_groups
                tables.append([at + group for at in self._places(job, end) for group in groups])
            rows.append((first, tokens_of(job, first, end), *tables))
        step = Step.of(0, rows, first_blocks=[[0] * len(rows)] * len(self._kinds))
        logits = self._program.run(self._prepare(step, 0), None, is_greedy=False).logits
        assert logits is not None
        assert logits.isfinite().all()
        return logits.clone()

    def _places(self, job: int, end: int) -> list[int]:
        """The first block of each place of the job's tables."""
        places = range(-(-end // BLOCK_SIZE))
        return [
            ((job if place * BLOCK_SIZE >= COMMON else 0) * BLOCKS_OF_A_JOB + place)
            * self._num_groups
            for place in places
        ]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_dtype": "int8"}],
    ids=str,
)
def test_logits_are_those_of_the_job_alone(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Alone, beside all others, and in smaller groups."""
    config = copy.deepcopy({**ROTARY, **DECODERS}[name])
    config.max_position_embeddings = POSITIONS
    random_model(config).save_pretrained(tmp_path)
    jobs = Jobs(tmp_path, **options)
    alone = torch.cat([jobs.decode([job]) for job in range(len(OWN))])
    assert len(alone.unique(dim=0)) == len(OWN)
    for group in ([0, 1, 2, 3, 4, 5], [5, 2, 0], [3, 1], [4, 0, 1, 5, 3]):
        assert torch.equal(jobs.decode(group), alone[group])
