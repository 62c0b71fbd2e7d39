"""What the disk gains where host memory is too small for all paused sessions, and what it costs.

    python -m benchmarks.disk_sessions                # some minutes on two cores
    python -m benchmarks.disk_sessions --dir /mnt/nvme

The real engine with the embedded model on this machine's CPU. Two engines take turns, one with a
disk. Four conversations take turns, and the host has room for one or two of them. In each pause
other jobs need the device's blocks, and one job decodes. In the pauses after first turns both
engines compute the same, and one also writes: the decoding job's times between tokens show what
that costs. Answers of both are compared, so the type is float32: in 16 bits, rounding decides some
tokens.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.job import JobOutput
from rich.console import Console

from benchmarks.agent_sessions import (
    ADDED_TOKENS,
    DEVICE_BLOCKS,
    FIRST_TOKENS,
    run_others,
    run_turn,
    show_ms,
    tokens,
)

NUM_CONVERSATIONS, NUM_TURNS = 4, 3
HOST_GIB, DISK_GIB = 0.15, 2.0  # a conversation takes 0.07 GiB
NUM_OTHERS = 3
DECODED_TOKENS = 120
DEADLINE_S = 120.0
console = Console(width=120)


def main() -> None:
    """Print how soon later turns have their first tokens, and how long others wait for tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", help="where the file is; default: the user's cache directory")
    parser.add_argument("--repeats", type=int, default=2, help="sets of conversations")
    arguments = parser.parse_args()
    keys: dict[str, Any] = {
        "device_blocks": DEVICE_BLOCKS,
        "swap_space_gib": HOST_GIB,
        "max_num_seqs": 8,
        "dtype": "float32",
        "session_ttl_s": 3600.0,
    }
    disk = {"disk_swap_gib": DISK_GIB, "disk_swap_dir": arguments.dir}
    first_s: dict[str, list[float]] = {"without": [], "with": []}
    gaps_s: dict[str, list[float]] = {"without": [], "with": []}
    with LLM(EMBEDDED_MODEL, **keys) as without, LLM(EMBEDDED_MODEL, **keys, **disk) as with_disk:
        sides = {"without": without, "with": with_disk}
        for repeat in range(arguments.repeats):
            rngs = {name: random.Random(repeat) for name in sides}
            prompts: dict[str, list[list[int]]] = {
                name: [[] for _ in range(NUM_CONVERSATIONS)] for name in sides
            }
            for turn in range(NUM_TURNS):
                for number in range(NUM_CONVERSATIONS):
                    for name, llm in sides.items():
                        rng, prompt = rngs[name], prompts[name][number]
                        prompt += tokens(rng, ADDED_TOKENS if turn else FIRST_TOKENS)
                        answer, seconds = run_turn(llm, prompt, f"{repeat}, {number}")
                        prompt += answer
                        gaps = pause(llm, rng)
                        if turn:
                            first_s[name].append(seconds)
                        else:
                            gaps_s[name] += gaps
            assert prompts["with"] == prompts["without"], "the disk changes answers"
        for name, llm in sides.items():
            console.print(
                f"{name} disk: first tokens of later turns after {show_ms(first_s[name])}; "
                f"{llm.engine.counters.session_hit_tokens} tokens of held KV; tokens of others "
                f"after {show_gaps(gaps_s[name])}"
            )
        counters, costs = with_disk.engine.counters, with_disk.engine._loop.kv._costs
        assert counters.disk_failures == 0
        written, read = counters.disk_write_bytes, counters.disk_read_bytes
        rates = [costs.block_bytes / costs.disk.transfer_s(out, 1) / 1e6 for out in (True, False)]
        console.print(
            f"{written / 2**20:.0f} MiB written at {rates[0]:.0f} MB/s, "
            f"{read / 2**20:.0f} MiB read at {rates[1]:.0f} MB/s, as learned"
        )
    medians = {name: statistics.median(values) for name, values in first_s.items()}
    console.print(f"{medians['without'] / medians['with']:.1f} x sooner, by the medians")


def pause(llm: LLM, rng: random.Random) -> list[float]:
    """Other jobs need the device's blocks; returns the times between tokens of one that decodes all
    the time, in seconds."""
    times_s: list[float] = []
    ended = threading.Event()

    def sink(output: JobOutput) -> None:
        times_s.append(time.perf_counter())
        if output.finish_reason is not None:
            ended.set()

    params = SamplingParams(max_tokens=DECODED_TOKENS, temperature=0, ignore_eos=True)
    llm.engine.submit("decoding", tokens(rng, 10), params, sink)
    run_others(llm, rng, NUM_OTHERS)
    assert ended.wait(DEADLINE_S)
    return [after - before for before, after in itertools.pairwise(times_s)]


def show_gaps(gaps_s: Sequence[float]) -> str:
    median, p99 = np.quantile(gaps_s, [0.5, 0.99]) * 1e3
    return f"{median:.1f} ms (median), {p99:.1f} ms (P99)"


if __name__ == "__main__":
    main()
