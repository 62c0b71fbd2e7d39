"""This project's engine as a worker: `fastserve_backend.LLM`, without a server.

The second argument has further keys of its configuration, as JSON.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from typing import Any

from fastserve_backend import LLM, SamplingParams
from fastserve_backend.job import JobOutput

from benchmarks.peers.worker import Limits, Lines

_BLOCK_SIZE = 16

Outputs = queue.SimpleQueue[tuple[int, JobOutput]]


def engine_keys(limits: Limits) -> dict[str, Any]:
    """The limits as keys of the engine's configuration. It takes one thread a core by itself."""
    return {
        "model": limits.model,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "block_size": _BLOCK_SIZE,
        "device_blocks": limits.kv_tokens // _BLOCK_SIZE,
        "prefix_caching": False,
        "generation_config": "off",  # no penalties, which the others would not have
    }


def write_outputs(outputs: Outputs, lines: Lines) -> None:
    """Writes what has come since the last line in one line."""
    while True:
        arrived = [outputs.get()]
        while not outputs.empty():
            arrived.append(outputs.get())
        for number, output in arrived:
            if output.error is not None:
                lines.write_error(f"job {number}: {output.error}")
        lines.write_tokens(
            [(number, token) for number, output in arrived for token in output.token_ids]
        )


def main() -> None:
    lines = Lines()
    keys = engine_keys(Limits.parse()) | json.loads(sys.argv[2])
    outputs: Outputs = queue.SimpleQueue()
    with LLM(**keys) as llm:
        threading.Thread(target=write_outputs, args=(outputs, lines), daemon=True).start()
        lines.write_ready("fastserve-triton")
        for job in lines.jobs():
            params = SamplingParams(max_tokens=job.max_tokens, temperature=0, ignore_eos=True)

            def on_output(output: JobOutput, number: int = job.number) -> None:
                outputs.put((number, output))

            llm.engine.submit(str(job.number), job.prompt, params, on_output)


if __name__ == "__main__":
    main()
