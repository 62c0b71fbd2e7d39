"""Turn a ``Step`` into tensors, run the model, choose the tokens."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastserve_backend.models.config import ModelConfig
from fastserve_backend.models.layers import AttentionBatch
from fastserve_backend.models.loader import CausalLM, torch_dtype
from fastserve_backend.models.partition import RankPlace
from fastserve_backend.worker.messages import StageDone, Step, StepResult
from fastserve_backend.worker.pipeline import Pipeline
from fastserve_backend.worker.sampler import sample

IntArray = npt.NDArray[Any]
ONLY_RANK = RankPlace()


class ModelRunner:
    """Runs one rank's part of the steps, on one device.

    Args:
        kv: the rank's cache, ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        kv: Tensor,
        device: torch.device,
        place: RankPlace = ONLY_RANK,
    ) -> None:
        self._model = model
        self._place = place
        self._pipeline = Pipeline(place, config.hidden_size, torch_dtype(config), device)
        self._eos_token_ids = config.eos_token_ids
        self._kv = kv
        self._block_size = kv.shape[4]
        self._device = device

    @property
    def waits_for_others(self) -> bool:
        """Whether a step begins with what an earlier stage sends."""
        return not self._place.is_first_stage

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult | StageDone | None:
        """One iteration; the result has one token for each job that is not a partial prefill.

        Only the first rank of a stage answers, and only that of the last stage with tokens.
        """
        started = time.perf_counter()
        query_lens = np.frombuffer(step.query_lens, dtype=np.int32)
        ends = np.cumsum(query_lens)
        positions, batch = self._lay_out(step, query_lens, ends)
        token_ids = np.frombuffer(step.token_ids, dtype=np.int32).astype(np.int64)
        received = None
        if self.waits_for_others:
            received = self._pipeline.receive(len(token_ids))
            started = time.perf_counter()
        hidden = self._model.forward(
            self._tensor(token_ids), self._tensor(positions), batch, self._kv, received
        )
        answers = self._place.tensor_rank == 0
        if not self._place.is_last_stage:
            self._pipeline.send(hidden)
            if not answers:
                return None
            self._wait()
            return StageDone(step.step_id, time.perf_counter() - started)
        sampled = ends[: len(ends) - step.num_partial] - 1
        if len(sampled) == 0:
            if not answers:
                return None
            # No token is fetched, which would wait. The result says that the keys and values are
            # written: the engine may order a copy of them.
            self._wait()
            return StepResult(step.step_id, b"", time.perf_counter() - started, b"", [])
        if len(hidden) != len(sampled):
            hidden = hidden[self._tensor(sampled)]  # only the last token of a prefill needs logits
        logits = self._model.logits(hidden)
        if logits is None:
            return None
        tokens = sample(logits, step.sampling, self._eos_token_ids)
        return StepResult(
            step_id=step.step_id,
            token_ids=tokens.token_ids.to(torch.int32).numpy().tobytes(),
            compute_s=time.perf_counter() - started,
            logprobs=tokens.logprobs,
            top_logprobs=tokens.top_logprobs,
        )

    def _lay_out(
        self, step: Step, query_lens: IntArray, ends: IntArray
    ) -> tuple[IntArray, AttentionBatch]:
        num_jobs, num_tokens = len(query_lens), int(ends[-1])
        starts = np.frombuffer(step.starts, dtype=np.int32)
        counts = np.frombuffer(step.block_counts, dtype=np.int32)
        tables = np.zeros((num_jobs, int(counts.max())), dtype=np.int32)
        tables[np.arange(tables.shape[1])[None, :] < counts[:, None]] = np.frombuffer(
            step.block_ids, dtype=np.int32
        )
        rows = np.repeat(np.arange(num_jobs, dtype=np.int32), query_lens)
        first_rows = ends - query_lens
        positions = np.arange(num_tokens) + np.repeat(starts - first_rows, query_lens)
        blocks = tables[rows, positions // self._block_size].astype(np.int64)
        fresh = [
            (int(first_rows[job]), int(ends[job]))
            for job in range(step.num_decodes, num_jobs)
            if starts[job] == 0
        ]
        batch = AttentionBatch(
            slots=self._tensor(blocks * self._block_size + positions % self._block_size),
            block_tables=self._tensor(tables),
            table_rows=self._tensor(rows),
            context_lens=self._tensor((positions + 1).astype(np.int32)),
            num_decode_tokens=step.num_decodes,
            fresh_prefills=fresh,
        )
        return positions, batch

    def _wait(self) -> None:
        """Until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
