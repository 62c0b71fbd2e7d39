"""A rank's step on a CPU as one call of the compiled library: one call replaces some hundreds.

`StepGraphs` is the counterpart on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fastserve_kernels import ops
from fastserve_kernels.backend import compiled_for
from fastserve_kernels.cpu.program import Program
from fastserve_kernels.cpu.recording import StepRecorder, UnrecordableError
from torch import Tensor

from fastserve_backend.models.attention import AttentionBatch, CPUBatch
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.worker.step_inputs import StepLimits, StepTensors

# Placeholders of counts. All must be different, and no step is larger than the last two.
_DECODES, _PREFILLS, _LEAST_ROWS = 1, 2, 3


@dataclass(frozen=True)
class StepOutput:
    """What a step computes; valid until the next step.

    hidden: [T, width], the activations for the next stage; None in the last stage.
    logits: see `CausalLM.logits`; None in other stages.
    greedy: the `ops.greedy_tokens` of the logits, if they were asked for and there are logits. They
        stay valid.
    """

    hidden: Tensor | None = None
    logits: Tensor | None = None
    greedy: tuple[Tensor, Tensor] | None = None


class StepProgram:
    """The forward pass, the head and the greedy choice, recorded once for steps of all sizes.

    Its results are bit for bit those of the model's Python code, which it has recorded.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: Tensor,
        limits: StepLimits,
        num_groups: int,
        *,
        width: int,
        dtype: torch.dtype,
        has_earlier_stage: bool,
        is_last_stage: bool,
    ) -> None:
        """
        Args:
            num_groups: of layers, see `AttentionBatch`.
            width, dtype: those of the activations between stages.

        Raises:
            UnrecordableError: the model computes something by other means than the operations of
                `fastserve_kernels`.
        """
        kernels = compiled_for(torch.empty(0, dtype=dtype))
        if kernels is None:
            raise UnrecordableError("no compiled kernels")
        most_sampled = max(limits.max_jobs, _LEAST_ROWS)
        most_tokens = max(limits.max_tokens, most_sampled + 1)
        recorder = StepRecorder()
        recorder.count(most_tokens)
        recorder.count(most_sampled)
        recorder.count(_DECODES, splits=True)
        recorder.count(_PREFILLS)
        jobs = _DECODES + _PREFILLS
        token_ids = recorder.input((most_tokens,), torch.int64)
        positions = recorder.input((most_tokens,), torch.int64)
        sampled = recorder.input((most_sampled,), torch.int64)
        block_tables = recorder.input((1,), torch.int32)
        context_lens = recorder.input((jobs,), torch.int32)
        query_starts = recorder.input((_PREFILLS + 1,), torch.int32)
        groups = [
            CPUBatch(
                num_decodes=_DECODES,
                slots=recorder.input((most_tokens,), torch.int64),
                block_tables=block_tables,
                table_starts=recorder.input((jobs,), torch.int32),
                context_lens=context_lens,
                query_starts=query_starts,
                beginnings=ops.CommonBeginnings(
                    order=recorder.input((jobs,), torch.int32),
                    common=recorder.input((jobs,), torch.int32),
                ),
            )
            for _ in range(num_groups)
        ]
        received = recorder.input((most_tokens, width), dtype) if has_earlier_stage else None
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None
        greedy: list[Tensor] = []
        with recorder.recording():
            batch = AttentionBatch(groups)
            output = model.forward(token_ids, positions, batch, kv, received, sampled)
            output = None if output is None else recorder.lasting(output)
            self._end = recorder.num_instructions
            if not is_last_stage:
                self._hidden = output
            elif output is not None:
                self._logits = output
                greedy = [recorder.lasting(one) for one in ops.greedy_tokens(output)]
            self._greedy_end = recorder.num_instructions
        # numpy copies a few elements in half the time that torch takes.
        self._greedy = [one.numpy() for one in greedy]
        self._program: Program = recorder.program(kernels.run_program)
        self.num_bytes = recorder.num_bytes
        """Of memory for activations, at most."""

    def run(self, inputs: StepTensors, received: Tensor | None, *, is_greedy: bool) -> StepOutput:
        """
        Args:
            received: activations of the stage before, [T, width]; None in the first stage.
            is_greedy: whether the most likely tokens are wanted.
        """
        groups = inputs.batch.groups
        shared = groups[0]
        assert isinstance(shared, CPUBatch)
        values = [
            inputs.num_tokens,
            inputs.num_sampled,
            inputs.num_decodes,
            inputs.num_jobs - inputs.num_decodes,
            inputs.token_ids.data_ptr(),
            inputs.positions.data_ptr(),
            inputs.sampled.data_ptr(),
            shared.block_tables.data_ptr(),
            shared.context_lens.data_ptr(),
            shared.query_starts.data_ptr(),
        ]
        for group in groups:
            assert isinstance(group, CPUBatch)
            arrays = group.slots, group.table_starts, *group.beginnings
            values += [array.data_ptr() for array in arrays]
        if received is not None:
            values.append(received.data_ptr())
        self._program.run(values, self._greedy_end if is_greedy else self._end)
        if self._hidden is not None:
            return StepOutput(hidden=self._hidden[: inputs.num_tokens])
        if self._logits is None or inputs.num_sampled == 0:
            return StepOutput()
        rows = slice(inputs.num_sampled)
        greedy = None
        if is_greedy:
            token_ids, answers = (torch.from_numpy(one[rows].copy()) for one in self._greedy)
            greedy = token_ids, answers
        return StepOutput(logits=self._logits[rows], greedy=greedy)
