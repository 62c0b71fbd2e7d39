"""llama.cpp as a worker: continuous batching over its sequences, as llama-server does it.

A step has the next token of each job that decodes, and then as many tokens of prompts as fit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import llama_cpp
import numpy as np

from benchmarks.peers.worker import Job, Limits, Lines, Tokens, serve_steps


@dataclass(slots=True)
class Sequence:
    """A job that has a place in the KV cache."""

    job: Job
    place: int
    pending: list[int]
    """Tokens that have not been computed: of the prompt, or the last one that was generated."""
    num_computed: int = 0
    num_generated: int = 0


class LlamaCpp:
    def __init__(self, limits: Limits) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            limits.model.encode(), llama_cpp.llama_model_default_params()
        )
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        params = llama_cpp.llama_context_default_params()
        # Each sequence has its own part of the cache, which is faster than one for all.
        params.kv_unified = False
        params.n_seq_max = limits.max_num_seqs
        params.n_ctx = limits.max_num_seqs * limits.max_model_len
        params.n_batch = limits.max_num_batched_tokens
        params.n_threads = params.n_threads_batch = limits.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if self._context is None:
            raise RuntimeError("llama.cpp made no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._most_tokens = limits.max_num_batched_tokens
        self._batch = llama_cpp.llama_batch_init(self._most_tokens, 0, 1)
        self._waiting: deque[Job] = deque()
        self._running: list[Sequence] = []
        self._free_places = list(range(limits.max_num_seqs))

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def has_jobs(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> Tokens:
        while self._waiting and self._free_places:
            job = self._waiting.popleft()
            self._running.append(Sequence(job, self._free_places.pop(), job.prompt))
        sampled = self._fill_batch()
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        tokens = []
        for row, sequence in sampled:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
            tokens.append((sequence.job.number, token))
            sequence.pending = [token]
            sequence.num_generated += 1
            if sequence.num_generated == sequence.job.max_tokens:
                llama_cpp.llama_memory_seq_rm(self._memory, sequence.place, -1, -1)
                self._running.remove(sequence)
                self._free_places.append(sequence.place)
        return tokens

    def _fill_batch(self) -> list[tuple[int, Sequence]]:
        """Returns the rows whose logits are wanted."""
        batch, row = self._batch, 0
        sampled = []
        for sequence in sorted(self._running, key=lambda one: one.num_generated == 0):
            now = sequence.pending[: self._most_tokens - row]
            sequence.pending = sequence.pending[len(now) :]
            for token in now:
                batch.token[row] = token
                batch.pos[row] = sequence.num_computed
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence.place
                batch.logits[row] = False
                sequence.num_computed += 1
                row += 1
            if now and not sequence.pending:
                batch.logits[row - 1] = True
                sampled.append((row - 1, sequence))
        batch.n_tokens = row
        return sampled


def main() -> None:
    lines = Lines()
    engine = LlamaCpp(Limits.parse())
    lines.write_ready("llama-cpp-python")
    serve_steps(engine, lines)


if __name__ == "__main__":
    main()
