"""Ranks on emulated GPUs do all that real ones do, except NCCL and timing."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import emulated_rank
import ptx.driver
import pytest
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.rank_protocol.messages import CopyBlocks, CopyResult, Step, StepResult
from job_steps import BLOCK_SIZE, BLOCKS, NUM_BLOCKS, PROMPTS, run_turns
from parallel_models import run_ranks_by, started_ranks
from transformers import PreTrainedModel

LIMITS = {
    "block_size": BLOCK_SIZE,
    "device_blocks": NUM_BLOCKS,
    "swap_space_gib": 0.001,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 52,
    "max_model_len": 48,
}


def result_of(executor: DistributedExecutor, step: Step | None = None) -> StepResult:
    if step is not None:
        executor.submit(step)
    while not isinstance(result := executor.collect(), StepResult):
        pass
    return result


def tokens_of_turns(executor: DistributedExecutor, ahead: bool) -> list[bytes]:
    """Tokens of chunks and decodes. Half of the jobs sample at random."""

    def launch(step: Step) -> Callable[[], StepResult]:
        executor.submit(step)
        return partial(result_of, executor)

    return [result.token_ids for result in run_turns(launch, ahead=ahead)]


def copy(executor: DistributedExecutor, is_out: bool, device: list[int], host: list[int]) -> None:
    ids = [array("i", blocks).tobytes() for blocks in (device, host)]
    executor.copy(CopyBlocks(int(is_out), is_out, *ids, BLOCK_SIZE))
    while (result := executor.collect()) is None:  # a stage of the step has ended meanwhile
        pass
    assert isinstance(result, CopyResult)
    assert result.error is None


@pytest.mark.parametrize(
    ("architecture", "name", "tensor_size", "num_stages"),
    [
        pytest.param("sm_80", "opt", 1, 1, marks=pytest.mark.repeated),
        ("sm_90", "llama", 2, 1),
        ("sm_80", "gpt_neox", 1, 2),
    ],
)
def test_as_a_rank_on_a_cpu(
    architecture: str,
    name: str,
    tensor_size: int,
    num_stages: int,
    checkpoints: dict[str, tuple[Path, PreTrainedModel]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, _ = checkpoints[name]
    with started_ranks(checkpoint, **LIMITS) as (executor, _):
        expected = tokens_of_turns(executor, ahead=False)
    monkeypatch.setenv(ptx.driver.VARIABLE, architecture)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run_ranks_by(emulated_rank, tmp_path, monkeypatch)
    parts = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": num_stages}
    with started_ranks(checkpoint, device="cuda", **parts, **LIMITS) as (executor, ready):
        assert ready.hardware == "emulated"
        assert tokens_of_turns(executor, ahead=num_stages == 1) == expected

        # The same decode runs before its blocks go to the host, and after they return to other
        # places.
        prefill = Step.of(100, list(zip([0] * 4, PROMPTS, BLOCKS, strict=True)), num_partial=0)
        tokens = array("i", result_of(executor, prefill).token_ids)
        decode = [(len(prompt), [token]) for prompt, token in zip(PROMPTS, tokens, strict=True)]
        here = [(*part, blocks) for part, blocks in zip(decode, BLOCKS, strict=True)]
        before = result_of(executor, Step.of(101, here, num_partial=0)).token_ids
        all_blocks = list(range(NUM_BLOCKS))
        copy(executor, True, all_blocks, all_blocks)
        copy(executor, False, all_blocks, all_blocks[::-1])
        moved = [[NUM_BLOCKS - 1 - block for block in blocks] for blocks in BLOCKS]
        there = [(*part, blocks) for part, blocks in zip(decode, moved, strict=True)]
        assert result_of(executor, Step.of(102, there, num_partial=0)).token_ids == before
