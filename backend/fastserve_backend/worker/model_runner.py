"""Runs a rank's part of each step: prepare inputs, run the model, sample, answer."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from fastserve_kernels import ops
from fastserve_kernels.cpu.recording import UnrecordableError
from torch import Tensor

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import RankPlace
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.loader import torch_dtype
from fastserve_backend.models.model_part import ALONE, TensorGroup
from fastserve_backend.rank_protocol.messages import StageDone, Step, StepResult
from fastserve_backend.worker.pipeline import Pipeline
from fastserve_backend.worker.prompt_scores import ScoredPrompts, score_prompts
from fastserve_backend.worker.sampler import SampledTokens, sample
from fastserve_backend.worker.step_graphs import StepGraphs
from fastserve_backend.worker.step_inputs import (
    CPUInputs,
    StepInputs,
    StepLimits,
    StepTensors,
    WorkListInputs,
)
from fastserve_backend.worker.step_program import StepOutput, StepProgram

ONLY_RANK = RankPlace()
_log = logging.getLogger(__name__)


class ModelRunner:
    """Runs one rank's part of the steps on one device. `launch` is a step from top to bottom.

    On a CPU a step is done when `launch` returns. Its operations are recorded in the constructor
    (`StepProgram`), if that is possible. On a GPU `launch` waits for nothing, so the next
    step can be launched while this one runs:

    - Inputs reach the GPU by a copy that the host does not wait for.
    - The attention kernels get work lists that the host has made.
    - Steps replay CUDA graphs, captured in the constructor, where launching them kernel by kernel
      would take the host long (`graph_sizes`).

    Steps share the GPU's inputs, its scratch memory, the graphs' memory and the last tokens. All
    work goes to the launching thread's current stream, whose order keeps the steps apart.

    Args:
        kv: the rank's cache, ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``.
        limits: bounds that every step keeps.
        tensor: the ranks of this rank's stage.
        may_record: False runs the model's Python code in each step on a CPU. Results are the same.
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
        *,
        may_record: bool = True,
    ) -> None:
        assert place.tensor_size == tensor.size
        self.device = device
        self._model = model
        self._place = place
        self._kv = kv
        self._eos_token_ids = config.eos_token_ids
        self._vocab_size = config.vocab_size
        width, dtype = config.hidden_size, torch_dtype(config)
        self._pipeline = Pipeline(place, width, dtype, device)
        self._last_tokens = LastTokens(tensor)
        # The first broadcast opens connections and takes memory: do it before serving.
        tensor.broadcast(torch.zeros(1, dtype=torch.int64, device=device))
        kinds = config.layer_groups.kinds
        self._inputs: StepInputs = CPUInputs(kv.shape[4], kinds)
        self._graphs: StepGraphs | None = None
        self._program: StepProgram | None = None
        if device.type == "cpu" and ops.cpu_backend() == "compiled" and may_record:
            num_groups = sum(kind.num_groups for kind in kinds)
            self._program = self._recorded(model, kv, limits, num_groups, width, dtype)
        if ops.uses_triton(device):
            inputs = WorkListInputs(kv, config, limits, place.tensor_size)
            self._inputs = inputs
            self._graphs = StepGraphs(
                self._forward,
                inputs,
                has_earlier_stage=self.has_earlier_stage,
                width=width,
                dtype=dtype,
                device=device,
            )

    @property
    def has_earlier_stage(self) -> bool:
        """Whether a step waits for another rank's activations."""
        return not self._place.is_first_stage

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step may still run when `launch` has returned."""
        return self.device.type == "cuda"

    def close(self) -> None:
        """Free what the process group waits for when it is destroyed. No step may follow."""
        if self._graphs is not None:
            self._graphs.close()

    def run(self, step: Step) -> StepResult | StageDone | None:
        """Launch a step and wait for its answer."""
        launched = self.launch(step)
        return None if launched is None else launched.answer()

    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep | None:
        """Start this rank's part of a step.

        Returns None on the ranks that do not answer: only the first rank of each stage does, and
        only the last stage's answer has tokens.

        Raises:
            IndexError: the step takes a token that the step before it did not choose.
        """
        inputs = self._inputs.prepare(step, self._last_tokens.count)
        if step.previous_rows and self._last_tokens.count > 0:
            self._last_tokens.fill_in(inputs.token_ids[: inputs.num_decodes])
        received = self._pipeline.receive(inputs.num_tokens) if self.has_earlier_stage else None
        # Not earlier: an idle device would start the watch while the host still prepares.
        watch = Stopwatch(self.device)
        tokens = prompts = None
        if not self._place.is_last_stage:
            output = self._run_model(inputs, received, is_greedy=False)
            assert output.hidden is not None
            self._pipeline.send(output.hidden)
        elif step.prompt_rows:
            hidden = self._hidden_states(inputs, received)
            prompts, logits = score_prompts(
                hidden, step.prompt_rows, inputs.sampled, self._model.logits, self._vocab_size
            )
            tokens = self._sample(StepOutput(logits=logits), step, inputs)
        else:
            output = self._run_model(inputs, received, is_greedy=step.sampling is None)
            tokens = self._sample(output, step, inputs)
        watch.stop()
        if self._place.tensor_rank != 0:
            return None
        return LaunchedStep(step.step_id, watch, tokens, self._place.is_last_stage, prompts)

    def _recorded(
        self,
        model: CausalLM,
        kv: Tensor,
        limits: StepLimits,
        num_groups: int,
        width: int,
        dtype: torch.dtype,
    ) -> StepProgram | None:
        try:
            return StepProgram(
                model,
                kv,
                limits,
                num_groups,
                width=width,
                dtype=dtype,
                has_earlier_stage=self.has_earlier_stage,
                is_last_stage=self._place.is_last_stage,
            )
        except UnrecordableError as error:
            _log.info("steps run as Python code, because they cannot be recorded: %s", error)
            return None

    def _run_model(
        self, inputs: StepTensors, received: Tensor | None, *, is_greedy: bool
    ) -> StepOutput:
        """Its tensors stay valid, but for logits."""
        if self._program is not None:
            output = self._program.run(inputs, received, is_greedy=is_greedy)
            if output.hidden is None:
                return output
            # The program may run again before these activations have been sent.
            return StepOutput(hidden=output.hidden.clone())
        hidden = self._hidden_states(inputs, received)
        if self._place.is_last_stage:
            return StepOutput(logits=self._model.logits(hidden, inputs.sampled))
        # A graph may run again before these activations have been sent.
        return StepOutput(hidden=hidden if inputs.size is None else hidden.clone())

    def _hidden_states(self, inputs: StepTensors, received: Tensor | None) -> Tensor:
        """[num_tokens, width]. Those of a padded step are valid until the next step."""
        if self._graphs is not None and inputs.size is not None:
            return self._graphs.run(inputs, received)
        hidden = self._forward(inputs, received)
        assert hidden is not None  # no logits are asked for
        return hidden

    def _forward(self, inputs: StepTensors, received: Tensor | None) -> Tensor | None:
        return self._model.forward(
            inputs.token_ids, inputs.positions, inputs.batch, self._kv, received
        )

    def _sample(self, output: StepOutput, step: Step, inputs: StepTensors) -> SampledTokens | None:
        """Choose a token for each row and keep it for the next step. None if there are no logits:
        no row gets a token, or another rank of the stage chooses."""
        tokens = None
        if output.logits is not None:
            tokens = sample(
                output.logits,
                step.sampling,
                self._eos_token_ids,
                inputs.token_ids,
                output.greedy,
            )
        self._last_tokens.keep(inputs.num_sampled, None if tokens is None else tokens.token_ids)
        return tokens


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still run.

    tokens: None if no job gets one in this step.
    prompts: None if no log-probabilities of prompts are wanted.
    """

    step_id: int
    watch: Stopwatch
    tokens: SampledTokens | None
    is_last_stage: bool
    prompts: ScoredPrompts | None = None

    def answer(self) -> StepResult | StageDone:
        """Wait until the device has finished the step. Any thread may call this.

        By then the step's keys and values are written, so the engine may request a copy of them.
        """
        compute_s = self.watch.seconds()
        if not self.is_last_stage:
            return StageDone(self.step_id, compute_s)
        if self.tokens is None:
            result = StepResult(self.step_id, b"", compute_s, b"", [])
        else:
            result = self.tokens.result(self.step_id, compute_s)
        if self.prompts is not None:
            result.prompt_scores = self.prompts.on_host()
        return result


class Stopwatch:
    """Measures how long the device works on a step, from construction to `stop`.

    On a GPU both ends are events on the stream, for which the host does not wait. The watch starts
    when the GPU has finished what it was given earlier, such as the step before or the receiving of
    activations. So the watches of successive steps never overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._started = self._now()
        self._stopped = self._started

    def stop(self) -> None:
        """Call this on the thread and stream that made the watch."""
        self._stopped = self._now()

    def seconds(self) -> float:
        """Time between start and stop. Any thread may call this. With a GPU it waits until the
        GPU has reached the stop."""
        started, stopped = self._started, self._stopped
        if isinstance(started, float):
            assert isinstance(stopped, float)
            return stopped - started
        assert isinstance(stopped, torch.cuda.Event)
        stopped.synchronize()
        return float(started.elapsed_time(stopped)) / 1e3

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_gpu:
            return time.perf_counter()
        # A blocking event sleeps. Spinning would take a core from the threads that launch and copy.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event


class LastTokens:
    """The tokens that the last step chose, on the device.

    The next step may need them before the host knows them. Only the first rank of a tensor group
    chooses tokens. The other ranks know how many there are, and get them when a step needs them.
    """

    def __init__(self, tensor: TensorGroup) -> None:
        self.count = 0
        """How many tokens there are; 0 before the first step."""
        self._tensor = tensor
        self._token_ids: Tensor | None = None

    def keep(self, count: int, token_ids: Tensor | None) -> None:
        """Replace the tokens.

        Args:
            token_ids: int64 [count], perhaps still being computed; None on ranks that do not
                choose.
        """
        self.count = count
        self._token_ids = token_ids

    def fill_in(self, token_ids: Tensor) -> None:
        """Replace each negative id by the token that it stands for, in place.

        The host waits for nothing. Every rank of the group must call this, and ``count`` must not
        be 0.

        Args:
            token_ids: int64 [n]; a negative id is an index from the end of the kept tokens.
        """
        kept = self._token_ids
        if kept is None:
            kept = torch.empty(self.count, dtype=torch.int64, device=token_ids.device)
        self._tensor.broadcast(kept)
        if token_ids.device.type == "cpu":  # without torch, which takes three times as long here
            ids = token_ids.numpy()
            pending = np.flatnonzero(ids < 0)
            ids[pending] = kept.numpy()[ids[pending]]
            return
        # Known ids look up the last kept token in vain. Selecting by a mask instead would give a
        # size for which the host had to wait.
        found = kept[token_ids.clamp(max=-1)]
        torch.where(token_ids < 0, found, token_ids, out=token_ids)
