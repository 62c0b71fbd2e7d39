"""Run the model's part of each step, and choose the tokens."""

from __future__ import annotations

import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.models.config import ModelConfig
from fastserve_backend.models.loader import CausalLM, torch_dtype
from fastserve_backend.models.partition import RankPlace
from fastserve_backend.worker.decode_graphs import DecodeGraphs
from fastserve_backend.worker.messages import StageDone, Step, StepResult
from fastserve_backend.worker.pipeline import Pipeline
from fastserve_backend.worker.sampler import sample
from fastserve_backend.worker.step_inputs import (
    RowwiseInputs,
    StepInputs,
    StepLimits,
    StepTensors,
    WorkListInputs,
)
from fastserve_backend.worker.step_layout import StepLayout
from fastserve_backend.worker.stopwatch import Stopwatch

ONLY_RANK = RankPlace()


class ModelRunner:
    """Runs one rank's part of the steps, on one device.

    On a GPU the host waits for the device once a step, for its tokens: inputs are copied without a
    wait, the attention kernels get work lists, and steps of decodes alone are CUDA graphs, which
    are captured here.

    Args:
        kv: the rank's cache, ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``.
        limits: of the steps that will come.
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
    ) -> None:
        self._model = model
        self._place = place
        width, dtype = config.hidden_size, torch_dtype(config)
        self._pipeline = Pipeline(place, width, dtype, device)
        self._eos_token_ids = config.eos_token_ids
        self._kv = kv
        self._block_size = kv.shape[4]
        self._device = device
        self._inputs: StepInputs = RowwiseInputs()
        self._graphs: DecodeGraphs | None = None
        if ops.uses_triton(device):
            inputs = WorkListInputs(kv, config.num_heads // place.tensor_size, limits)
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

    def close(self) -> None:
        """Free what the process group waits for when it is destroyed; nothing runs after it."""
        if self._graphs is not None:
            self._graphs.close()

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult | StageDone | None:
        """One iteration; the result has one token for each job that is not a partial prefill.

        Only the first rank of a stage answers, and only that of the last stage with tokens.
        """
        watch = Stopwatch()
        layout = StepLayout.of(step, self._block_size)
        received = None
        if self.waits_for_others:
            received = self._pipeline.receive(layout.num_tokens)
            watch = Stopwatch(self._device)
        hidden = self._hidden(layout, received)
        answers = self._place.tensor_rank == 0
        if not self._place.is_last_stage:
            self._pipeline.send(hidden)
            if not answers:
                return None
            self._wait()
            return StageDone(step.step_id, watch.seconds())
        if len(layout.sampled) == 0:
            if not answers:
                return None
            # No token is fetched, which would wait. The result says that the keys and values are
            # written: the engine may order a copy of them.
            self._wait()
            return StepResult(step.step_id, b"", watch.seconds(), b"", [])
        logits = self._model.logits(hidden)
        if logits is None:
            return None
        tokens = sample(logits, step.sampling, self._eos_token_ids)
        return StepResult(
            step_id=step.step_id,
            token_ids=tokens.token_ids.to(torch.int32).numpy().tobytes(),
            compute_s=watch.seconds(),
            logprobs=tokens.logprobs,
            top_logprobs=tokens.top_logprobs,
        )

    def _hidden(self, layout: StepLayout, received: Tensor | None) -> Tensor:
        """What the next stage gets, [T, width], or on the last the rows of which logits are wanted,
        [R, width]."""
        if self._graphs is not None and layout.only_decodes:
            hidden = self._graphs.run(layout, received)
            # The next run of a graph may come before this one's result has been sent.
            return hidden if self._place.is_last_stage else hidden.clone()
        tensors = self._inputs.bring(layout)
        hidden = self._forward(tensors, received)
        if self._place.is_last_stage and len(layout.sampled) != layout.num_tokens:
            hidden = hidden[tensors.sampled]  # of a prefill only the last token's
        return hidden

    def _forward(self, tensors: StepTensors, received: Tensor | None) -> Tensor:
        return self._model.forward(
            tensors.token_ids, tensors.positions, tensors.batch, self._kv, received
        )

    def _wait(self) -> None:
        """Until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
