"""Run the model's part of each step, and choose the tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import RankPlace
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.loader import torch_dtype
from fastserve_backend.models.tensor_group import ALONE, TensorGroup
from fastserve_backend.rank_protocol.messages import StageDone, Step, StepResult
from fastserve_backend.worker.block_copies import copy_within
from fastserve_backend.worker.decode_graphs import DecodeGraphs
from fastserve_backend.worker.last_tokens import LastTokens
from fastserve_backend.worker.pipeline import Pipeline
from fastserve_backend.worker.sampler import SampledTokens, sample
from fastserve_backend.worker.step_inputs import (
    CPUInputs,
    StepInputs,
    StepLimits,
    StepTensors,
    WorkListInputs,
)
from fastserve_backend.worker.step_layout import StepLayout
from fastserve_backend.worker.stopwatch import Stopwatch

ONLY_RANK = RankPlace()
Answer = Callable[[], StepResult | StageDone]
"""To a step that was launched: waits until the device has done it. Any thread may call it."""


class ModelRunner:
    """Runs one rank's part of the steps, on one device.

    To launch a step on a GPU the host waits for nothing, so that the next can be launched while it
    runs: inputs are copied without a wait, the attention kernels get work lists, and steps of
    decodes alone are CUDA graphs, which are captured here. All is put on the launching thread's
    current stream, whose order keeps steps from what they share: the device's inputs, scratch, the
    memory of graphs, the last tokens. On a CPU a step is done when it is launched.

    Args:
        kv: the rank's cache, ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``.
        limits: of the steps that will come.
        tensor: the ranks of this one's stage.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        kv: Tensor,
        device: torch.device,
        limits: StepLimits,
        place: RankPlace = ONLY_RANK,
        tensor: TensorGroup = ALONE,
    ) -> None:
        assert place.tensor_size == tensor.size
        self._model = model
        self._place = place
        width, dtype = config.hidden_size, torch_dtype(config)
        self._pipeline = Pipeline(place, width, dtype, device)
        self._eos_token_ids = config.eos_token_ids
        self._last_tokens = LastTokens(tensor)
        # The first broadcast makes connections and takes memory: now, not while serving.
        tensor.broadcast(torch.zeros(1, dtype=torch.int64, device=device))
        self._kv = kv
        self._block_size = kv.shape[4]
        self.device = device
        self._inputs: StepInputs = CPUInputs()
        self._graphs: DecodeGraphs | None = None
        if ops.uses_triton(device):
            heads = config.num_heads // place.tensor_size
            inputs = WorkListInputs(kv, heads, config.head_dim, dtype, limits)
            self._inputs = inputs
            self._graphs = DecodeGraphs(
                self._forward,
                inputs,
                limits.max_jobs,
                receives=self.waits_for_others,
                width=width,
                dtype=dtype,
                device=device,
            )

    @property
    def waits_for_others(self) -> bool:
        """Whether a step begins with what an earlier stage sends."""
        return not self._place.is_first_stage

    @property
    def runs_behind(self) -> bool:
        """Whether a step may still run when it is launched."""
        return self.device.type == "cuda"

    def close(self) -> None:
        """Free what the process group waits for when it is destroyed; nothing runs after it."""
        if self._graphs is not None:
            self._graphs.close()

    def run(self, step: Step) -> StepResult | StageDone | None:
        """One iteration from its launch to its answer."""
        answer = self.launch(step)
        return None if answer is None else answer()

    @torch.inference_mode()
    def launch(self, step: Step) -> Answer | None:
        """Begin one iteration; the result will have one token for each job that is not a partial
        prefill.

        Only the first rank of a stage answers, and only that of the last stage with tokens.

        Raises:
            IndexError: the step takes a token that the one before did not choose.
        """
        copy_within(self._kv, array("i", step.copy_from), array("i", step.copy_to))
        layout = StepLayout.of(step, self._block_size, self._last_tokens.count)
        graphs = self._graphs if layout.only_decodes else None
        tensors = self._inputs.bring(layout) if graphs is None else graphs.bring(layout)
        if step.previous_rows and self._last_tokens.count > 0:
            self._last_tokens.fill_in(tensors.token_ids[: layout.num_decodes])
        received = self._pipeline.receive(layout.num_tokens) if self.waits_for_others else None
        # Not before: a device that has nothing to do would start it while the host prepares.
        watch = Stopwatch(self.device)
        hidden = self._hidden(layout, tensors, graphs, received)
        if not self._place.is_last_stage:
            self._pipeline.send(hidden)
            watch.stop()
            return partial(_stage_done, step, watch) if self._place.tensor_rank == 0 else None
        tokens = self._sample(hidden, step, tensors) if len(layout.sampled) > 0 else None
        watch.stop()
        self._last_tokens.keep(len(layout.sampled), None if tokens is None else tokens.token_ids)
        return partial(_result, step, tokens, watch) if self._place.tensor_rank == 0 else None

    def _sample(self, hidden: Tensor, step: Step, tensors: StepTensors) -> SampledTokens | None:
        """None but on the first rank of the stage."""
        logits = self._model.logits(hidden)
        if logits is None:
            return None
        return sample(logits, step.sampling, self._eos_token_ids, tensors.token_ids)

    def _hidden(
        self,
        layout: StepLayout,
        tensors: StepTensors,
        graphs: DecodeGraphs | None,
        received: Tensor | None,
    ) -> Tensor:
        """What the next stage gets, [T, width], or on the last the rows of which logits are wanted,
        [R, width]."""
        if graphs is not None:
            hidden = graphs.run(layout.num_jobs, received)
            # The next run of a graph may come before this one's result has been sent.
            return hidden if self._place.is_last_stage else hidden.clone()
        hidden = self._forward(tensors, received)
        if self._place.is_last_stage and len(layout.sampled) != layout.num_tokens:
            hidden = hidden[tensors.sampled]  # of a prefill only the last token's
        return hidden

    def _forward(self, tensors: StepTensors, received: Tensor | None) -> Tensor:
        return self._model.forward(
            tensors.token_ids, tensors.positions, tensors.batch, self._kv, received
        )


def _stage_done(step: Step, watch: Stopwatch) -> StageDone:
    return StageDone(step.step_id, watch.seconds())


def _result(step: Step, tokens: SampledTokens | None, watch: Stopwatch) -> StepResult:
    """``tokens`` None: no job got one. The result says that the keys and values are written: the
    engine may order a copy of them."""
    compute_s = watch.seconds()
    if tokens is None:
        return StepResult(step.step_id, b"", compute_s, b"", [])
    chosen = tokens.on_host()
    return StepResult(
        step_id=step.step_id,
        token_ids=chosen.token_ids.to(torch.int32).numpy().tobytes(),
        compute_s=compute_s,
        logprobs=chosen.logprobs,
        top_logprobs=chosen.top_logprobs,
    )
