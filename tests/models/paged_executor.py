"""Steps of a model over a paged cache, compared with transformers on the same tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoder_checkpoints import POSITIONS
from fastserve_backend.checkpoints.layer_groups import LayerGroups
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.attention import AttentionBatch, CPUBatch
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.loader import load_model
from fastserve_kernels.common_beginnings import common_beginnings
from torch import Tensor
from transformers import PreTrainedModel

BLOCK_SIZE = 4
TOLERANCE = 1e-4


def load(directory: Path) -> CausalLM:
    config = load_model_config(str(directory), load_format="auto", dtype="float32")
    return load_model(config, torch.device("cpu"))


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """transformers' logits of a prompt, [len(tokens), vocab]."""
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@dataclass
class Job:
    """`done` of its tokens are in the cache; `logits` has a row for each of them."""

    tokens: list[int]
    blocks: list[list[int]]  # of each group of layers
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)


class PagedExecutor:
    """Steps a model over jobs whose blocks lie scattered in a cache full of NaN.

    Layers with a window lose the blocks behind it.
    """

    def __init__(self, model: CausalLM, config: Any, prompts: list[list[int]], seed: int) -> None:
        self._model = model
        ours = getattr(model, "_config", None)  # only its models have windows
        self._groups = LayerGroups.of([None]) if ours is None else ours.layer_groups
        self._rotary_switch = None if ours is None else ours.rotary_switch
        self._kind_of_group = self._groups.kind_of_group
        longest = -(-POSITIONS // BLOCK_SIZE)
        total = longest * len(prompts) * len(self._kind_of_group) + 5
        order = random.Random(seed).sample(range(total), total)
        self.jobs = []
        for tokens in prompts:
            blocks = [[order.pop() for _ in range(longest)] for _ in self._kind_of_group]
            self.jobs.append(Job(tokens, blocks))
        config = config.get_text_config()
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        if ours is not None:
            heads, head_dim = ours.num_kv_heads, ours.head_dim
        self._kv = torch.full(
            (total, config.num_hidden_layers, 2, heads, BLOCK_SIZE, head_dim), float("nan")
        )

    def cast(self, dtype: torch.dtype) -> None:
        """Keep the cache in another number format."""
        self._kv = self._kv.to(dtype)

    @torch.inference_mode()
    def step(self, work: list[tuple[int, int]], *, padding: int = 0) -> None:
        """Run (job, token count) pairs as one batch, padding and decodes first."""
        work = sorted(work, key=lambda pair: pair[1] > 1)
        ids, positions, lengths = [0] * padding, [0] * padding, [0] * padding
        num_decodes, starts = padding, [0]
        for index, count in work:
            job = self.jobs[index]
            is_long = self._rotary_switch is not None and len(job.tokens) > self._rotary_switch
            for position in range(job.done, job.done + count):
                ids.append(job.tokens[position])
                positions.append(-1 - position if is_long else position)
            lengths.append(job.done + count)
            if count == 1:
                num_decodes += 1
            else:
                starts.append(starts[-1] + count)
        groups = []
        for group, kind in enumerate(self._kind_of_group):
            slots, tables, table_starts = self._places(group, work, padding)
            beginnings = common_beginnings(
                np.array(tables, dtype=np.int32),
                np.array(table_starts[:num_decodes], dtype=np.int32),
                np.array(lengths[:num_decodes], dtype=np.int32),
                BLOCK_SIZE,
                self._groups.kinds[kind].window,
            )
            groups.append(
                CPUBatch(
                    num_decodes=num_decodes,
                    slots=torch.tensor(slots),
                    block_tables=torch.tensor(tables, dtype=torch.int32),
                    table_starts=torch.tensor(table_starts, dtype=torch.int32),
                    context_lens=torch.tensor(lengths, dtype=torch.int32),
                    query_starts=torch.tensor(starts, dtype=torch.int32),
                    beginnings=beginnings,
                )
            )
        batch = AttentionBatch(groups)
        rows = torch.arange(len(ids))
        logits = self._model.forward(
            torch.tensor(ids), torch.tensor(positions), batch, self._kv, None, rows
        )
        assert logits is not None
        assert torch.isfinite(logits).all()
        start = padding
        for index, count in work:
            self.jobs[index].logits.extend(logits[start : start + count])
            self.jobs[index].done += count
            start += count

    def _places(
        self, group: int, work: list[tuple[int, int]], padding: int
    ) -> tuple[list[int], list[int], list[int]]:
        """A group's slots, block tables, and where these begin."""
        kind = self._groups.kinds[self._kind_of_group[group]]
        slots, tables, table_starts = [-1] * padding, list[int](), [0] * padding
        for index, count in work:
            job, blocks = self.jobs[index], self.jobs[index].blocks[group]
            for position in range(job.done, job.done + count):
                slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            first = kind.first_seen(job.done, BLOCK_SIZE)
            self._kv[blocks[:first]] = float("nan")
            table_starts.append(len(tables) - first)
            tables += blocks[first:]
        return slots, tables, table_starts


def prompts(*lengths: int) -> list[list[int]]:
    chooser = random.Random(sum(lengths))
    return [[chooser.randrange(301) for _ in range(length)] for length in lengths]


def check_prompt(ours: CausalLM, theirs: PreTrainedModel, length: int = 9) -> None:
    """A whole prompt in one step gives transformers' logits."""
    executor = PagedExecutor(ours, theirs.config, prompts(length), seed=5)
    executor.step([(0, length)])
    check(theirs, executor)


def check_chunked_prompts(ours: CausalLM, theirs: PreTrainedModel) -> None:
    """Whole prompts, and one in three chunks, give transformers' logits."""
    executor = PagedExecutor(ours, theirs.config, prompts(20, 1, 9), seed=2)
    executor.step([(0, 20), (1, 1), (2, 5)])
    executor.step([(2, 3)])
    executor.step([(2, 1)])
    check(theirs, executor)


def check(theirs: PreTrainedModel, executor: PagedExecutor) -> None:
    for job in executor.jobs:
        assert job.done == len(job.tokens)
        torch.testing.assert_close(
            torch.stack(job.logits), expected_logits(theirs, job.tokens), rtol=0, atol=TOLERANCE
        )
