"""How much of the time each of two pipeline stages is at work, when there are jobs enough.

    python benchmarks/pipeline_utilisation.py                  # simulated, then two real ranks
    python benchmarks/pipeline_utilisation.py --only simulated

Simulated: OPT-13B on two modelled A100s, jobs of one length that are all there from the start.
Real: two processes with one thread each and an OPT of eight layers with random weights in float32,
through the engine; the stages report what they computed. Filling and emptying the pipeline at the
ends is part of the time. FastServe §4.3: a stage takes a new batch as soon as it is free.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.config import EngineConfig
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.profile.hardware import find_hardware
from fastserve_backend.profile.roofline import Roofline
from fastserve_backend.simulation.memory import memory_of_roofline
from fastserve_backend.simulation.simulator import simulate
from fastserve_bench.workload import TraceJob
from rich.console import Console
from rich.table import Table

STAGES = 2
BATCH = 32
JOBS = 128
GOAL = 0.9
PROMPT, OUTPUT = 16, 32  # tokens
OPT = {
    "model_type": "opt",
    "num_hidden_layers": 8,
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "vocab_size": 2048,  # so small that the LM head is no stage of its own
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
POLICY = "skip_join_mlfq"


def simulated() -> list[float]:
    """Busy share of each stage."""
    config = EngineConfig().with_keys(max_num_seqs=BATCH, policy=POLICY)
    model = load_model_config("opt-13b", load_format="dummy", device="cuda")
    roofline = Roofline(model, find_hardware("a100-40g"), 1, STAGES)
    result = simulate(
        [TraceJob(0.0, PROMPT, OUTPUT)] * JOBS,
        config.scheduler,
        config.kv_cache,
        roofline,
        memory_of_roofline(roofline, model, config.kv_cache),
        max_model_len=model.max_model_len,
    )
    # A modelled iteration spends an equal share of its time in each stage.
    return [result.counters.compute_s / STAGES / result.ended_s] * STAGES


def real(directory: Path) -> list[float]:
    """Busy share of each stage."""
    (directory / "config.json").write_text(json.dumps(OPT), encoding="utf-8")
    rng = random.Random(1)
    prompts = [[rng.randrange(4, 2000) for _ in range(PROMPT)] for _ in range(JOBS)]
    params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    with LLM(
        str(directory),
        load_format="dummy",
        device="cpu",
        pipeline_parallel_size=STAGES,
        swap_space_gib=0.1,
        max_num_seqs=BATCH,
        policy=POLICY,
        prefix_caching=False,
    ) as llm:
        executor = llm.engine._supervisor.ranks.executor
        assert isinstance(executor, DistributedExecutor)
        llm.generate(prompts[:BATCH], SamplingParams(max_tokens=4), progress=False)  # warm up
        before, started_s = list(executor.busy_s), time.monotonic()
        llm.generate(prompts, params, progress=False)
        elapsed_s = time.monotonic() - started_s
        return [
            (end - begin) / elapsed_s for begin, end in zip(before, executor.busy_s, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("simulated", "real"))
    arguments = parser.parse_args()
    table = Table("", "stage 0 busy", "stage 1 busy", f"goal {GOAL:.0%}")
    shares = {}
    if arguments.only != "real":
        shares["simulated"] = simulated()
    if arguments.only != "simulated":
        with tempfile.TemporaryDirectory() as directory:
            shares["real"] = real(Path(directory))
    for name, busy in shares.items():
        met = "met" if min(busy) > GOAL else "missed"
        table.add_row(name, *(f"{share:.1%}" for share in busy), met)
    console = Console(width=100)
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
