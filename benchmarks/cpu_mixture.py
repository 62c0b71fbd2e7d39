"""Decode speed of a mixture of experts on a CPU, against memory speed and transformers.

    python -m benchmarks.cpu_mixture                  # OLMoE-1B-7B with 4 of its 16 layers
    python -m benchmarks.cpu_mixture --layers 16 --without-transformers
    python -m benchmarks.cpu_mixture --quantization int4 --without-transformers

Random weights and tokens, bfloat16, contexts of 16 tokens. A step is that of a rank: recorded, as
in serving, and as Python code. Figures are medians of the repeats, with the least and the most in
brackets; the share of memory speed is that of the least. A step at least reads all weights that
every token uses, and the experts that its tokens choose: their expected number, if each token
chooses at random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.models.loader import load_model
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.worker.kv_store import allocate_kv
from fastserve_backend.worker.model_runner import ModelRunner
from fastserve_backend.worker.step_inputs import StepLimits
from rich.console import Console
from rich.table import Table

MODEL, VOCAB_SIZE, CONTEXT, BLOCK_SIZE = "olmoe-1b-7b", 50304, 16, 16
BATCHES = (1, 2, 4, 8, 16)
BANDWIDTH_BYTES = 2**30

console = Console(width=120)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--quantization", choices=("int8", "int4"))
    arguments.add_argument("--without-transformers", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    fields = {
        "model_type": "olmoe",
        "num_hidden_layers": options.layers,
        "intermediate_size": 1024,
        "vocab_size": VOCAB_SIZE,
    }
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(fields))
        config = load_model_config(
            directory, load_format="dummy", dtype="bfloat16", quantization=options.quantization
        )
        device, most = torch.device("cpu"), max(BATCHES)
        model = load_model(config, device)
        kv = allocate_kv(config, device, BLOCK_SIZE, most, 0.9)
        kv.zero_()
        limits = StepLimits(most, most, config.max_model_len)
        runners = [
            ModelRunner(model, config, kv, device, limits, may_record=may_record)
            for may_record in (True, False)
        ]
        data = torch.ones(BANDWIDTH_BYTES // 4)
        reads, ours = seconds(data.sum, options.repeats), {}
        for jobs in BATCHES:
            ours[jobs] = [seconds(decode(runner, jobs), options.repeats) for runner in runners]
            reads += seconds(data.sum, options.repeats)  # the machine's speed may have changed
        bandwidth = BANDWIDTH_BYTES / min(reads)
        del model, runners
        theirs: dict[int, list[float]] = {}
        if not options.without_transformers:
            theirs = transformers_seconds(directory, options.repeats)
    console.print(
        f"{MODEL} with {options.layers} layers in {config.weight_format}: "
        f"{config.num_parameters / 1e9:.2f} billion parameters, "
        f"{config.num_active_parameters / 1e9:.2f} active; {options.threads} threads "
        f"read {bandwidth / 1e9:.1f} GB/s"
    )
    table = Table("jobs", "reading the weights, ms", "a step, ms", "share of memory speed")
    table.add_column("as Python code, ms")
    table.add_column("transformers, ms")
    for batch, (times, python) in ours.items():
        floor_s = bytes_read(config, batch) / bandwidth
        table.add_row(
            str(batch),
            f"{floor_s * 1e3:.1f}",
            summary(times),
            f"{floor_s / min(times):.0%}",
            summary(python),
            summary(theirs[batch]) if theirs else "",
        )
    console.print(table)


def bytes_read(config: ModelConfig, tokens: int) -> float:
    """Of weights by a step of so many tokens. Of the input table it reads few rows."""
    experts = config.num_expert_parameters
    always = config.num_parameters - experts - config.num_head_parameters
    return config.linear_element_bytes * (always + experts * config.share_of_experts_read(tokens))


def decode(runner: ModelRunner, jobs: int) -> Callable[[], object]:
    """A step of one token for each job."""

    def step() -> object:
        tokens = torch.randint(VOCAB_SIZE, (jobs,)).tolist()
        rows = [(CONTEXT - 1, [token], range(job, job + 1)) for job, token in enumerate(tokens)]
        return runner.run(Step.of(0, rows))

    return step


def transformers_seconds(directory: str, repeats: int) -> dict[int, list[float]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    times = {}
    for jobs in BATCHES:
        with torch.inference_mode():
            prompt = torch.randint(VOCAB_SIZE, (jobs, CONTEXT - 1))
            cache = model(prompt, use_cache=True).past_key_values

            def step(jobs: int = jobs, cache: object = cache) -> object:
                tokens = torch.randint(VOCAB_SIZE, (jobs, 1))
                answer = model(tokens, past_key_values=cache, use_cache=True)
                cache.crop(-1)  # type: ignore[attr-defined]
                return answer

            times[jobs] = seconds(step, repeats)
    return times


def seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Of each repeat, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def summary(times: list[float]) -> str:
    median, low, high = (1e3 * one for one in (statistics.median(times), min(times), max(times)))
    return f"{median:.1f} [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    main()
