"""OpenVINO GenAI as a worker: its pipeline with continuous batching, with its defaults for a CPU.

Those are dynamic quantization of activations to 8 bits and a KV cache in 8 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.worker import Job, Limits, Lines, Tokens, serve_steps

BLOCK_SIZE = 32
"""Tokens in a block of its KV cache on a CPU."""


class OpenVINO:
    def __init__(self, limits: Limits) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = limits.max_num_seqs
        scheduler.max_num_batched_tokens = limits.max_num_batched_tokens
        scheduler.num_kv_blocks = limits.kv_tokens // BLOCK_SIZE
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            limits.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": limits.threads}
        )
        self._running: dict[int, Any] = {}

    def add(self, job: Job) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([job.prompt], dtype=np.int64))
        self._running[job.number] = self._pipeline.add_request(job.number, prompt, config)

    def has_jobs(self) -> bool:
        return bool(self._running)

    def step(self) -> Tokens:
        self._pipeline.step()
        tokens, unfinished = [], {}
        for number, handle in self._running.items():
            while handle.can_read():
                (output,) = handle.read().values()
                tokens += [(number, token) for token in output.generated_ids]
            if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
                unfinished[number] = handle
        self._running = unfinished
        return tokens


def main() -> None:
    lines = Lines()
    engine = OpenVINO(Limits.parse())
    lines.write_ready("openvino-genai")
    serve_steps(engine, lines)


if __name__ == "__main__":
    main()
