"""Measures, before there is a KV cache, how much GPU memory steps take beside it."""

from __future__ import annotations

import gc

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import RankPlace
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.loader import torch_dtype
from fastserve_backend.models.model_part import TensorGroup
from fastserve_backend.rank_protocol.messages import PromptRows, Sampling
from fastserve_backend.worker.model_runner import ModelRunner
from fastserve_backend.worker.pipeline import Pipeline
from fastserve_backend.worker.prompt_scores import score_prompts
from fastserve_backend.worker.sampler import sample
from fastserve_backend.worker.step_inputs import StepLayout, StepLimits, WorkListInputs


def step_bytes(
    model: CausalLM,
    config: ModelConfig,
    kv: Tensor,
    limits: StepLimits,
    place: RankPlace,
    tensor: TensorGroup,
) -> int:
    """The most bytes that steps within the limits hold at once, without weights and KV.

    This is the sum of three parts:

    - the largest step, which is run and measured;
    - what a runner keeps (CUDA graphs, inputs, workspaces), which is built and measured;
    - activations that were sent and that the next stage has not received yet.

    Every rank must call this, because the ranks of a stage add up activations.

    Args:
        kv: a cache of one block, which stands for all blocks: the results mean nothing.
    """
    device = kv.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_step(model, config, kv, limits, place)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(device)
    runner = ModelRunner(model, config, kv, device, limits, place, tensor)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_after, _ = torch.cuda.mem_get_info(device)
    runner.close()
    del runner
    gc.collect()  # the runner and its graphs refer to each other
    torch.cuda.empty_cache()
    sent = Pipeline.most_sent_bytes(
        place, config.hidden_size, torch_dtype(config), limits.max_tokens
    )
    return peak - before + free_before - free_after + sent


@torch.inference_mode()
def run_largest_step(
    model: CausalLM, config: ModelConfig, kv: Tensor, limits: StepLimits, place: RankPlace
) -> None:
    """Run a step of the most tokens, nearly all of prompts, with log-probabilities of all of them.
    Then sample for the most jobs, each by top-p with log-probabilities: without masks, and with."""
    inputs = WorkListInputs(kv, config, limits, place.tensor_size)
    layout = _largest_layout(limits, kv.shape[4], inputs.num_groups)
    tensors = inputs.bring(layout)
    shape = (layout.num_tokens, config.hidden_size)
    received = None
    if not place.is_first_stage:
        received = torch.zeros(shape, dtype=torch_dtype(config), device=kv.device)
    hidden = model.forward(tensors.token_ids, tensors.positions, tensors.batch, kv, received)
    if not place.is_last_stage:
        return
    assert hidden is not None
    all_rows = PromptRows(job=0, first_row=0, token_ids=bytes(4 * len(hidden)), num_top=1)
    vocab_size = config.vocab_size
    _, logits = score_prompts(hidden, [all_rows], tensors.sampled, model.logits, vocab_size)
    if logits is not None:
        costliest = _costliest_sampling(limits.max_jobs, config.vocab_size)
        # On a GPU this compiles the kernels that choose from logits of the model's type, and those
        # for masked ones, in float32. Serving must not wait for that.
        for sampling in (replace(costliest, masked_rows=b"", masks=b"", no_eos=b""), costliest):
            sample(logits, sampling, config.eos_token_ids)


def _largest_layout(limits: StepLimits, block_size: int, num_groups: int) -> StepLayout:
    longest = min(limits.max_model_len, limits.max_tokens)
    lengths = [longest] * min(limits.max_jobs, limits.max_tokens // longest)
    rest = limits.max_tokens - sum(lengths)
    if rest and len(lengths) < limits.max_jobs:
        lengths.append(rest)
    num_decodes = 0
    if len(lengths) < limits.max_jobs and lengths[-1] > 1:
        # A decode beside the prompts. On a GPU this compiles the attention of decodes in such
        # steps, which may differ from that of decodes alone. Serving must not wait for that.
        num_decodes = 1
        lengths = [1, *lengths[:-1], lengths[-1] - 1]
    num_tokens = sum(lengths)
    query_starts = np.cumsum([0, *lengths], dtype=np.int32)
    return StepLayout(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        slots=np.full((num_groups, num_tokens), -1, dtype=np.int64),
        query_starts=query_starts,
        context_lens=np.array(lengths, dtype=np.int32),
        # The only block, repeated for all jobs and groups.
        block_tables=np.zeros(limits.max_blocks(block_size), dtype=np.int32),
        table_starts=np.zeros((num_groups, len(lengths)), dtype=np.int32),
        sampled=np.zeros(limits.max_jobs, dtype=np.int64),
        num_decodes=num_decodes,
    )


def _costliest_sampling(num_rows: int, vocab_size: int) -> Sampling:
    return Sampling(
        temperature=np.ones(num_rows, dtype=np.float32).tobytes(),
        top_k=np.zeros(num_rows, dtype=np.int32).tobytes(),
        top_p=np.full(num_rows, 0.9, dtype=np.float32).tobytes(),
        uniform=np.full(num_rows, 0.5).tobytes(),
        no_eos=np.ones(num_rows, dtype=np.bool_).tobytes(),
        num_logprobs=np.zeros(num_rows, dtype=np.int32).tobytes(),
        penalties=[],
        masked_rows=np.arange(num_rows, dtype=np.int32).tobytes(),
        masks=b"\xff" * (4 * -(-vocab_size // 32) * num_rows),
    )
