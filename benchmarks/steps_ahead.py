"""What it brings to send each step before the one before it has ended.

    python benchmarks/steps_ahead.py                  # a quarter of an hour
    python benchmarks/steps_ahead.py --device cuda

Two engines of OPT-125M with random weights take turns: one whose ranks are sent the next step while
one runs, and one that waits for each step's tokens. First decodes of a few batch sizes, then jobs
that arrive over time, under skip-join MLFQ. Figures are medians of the repeats, with the least and
the most in brackets; ratios are medians of those of the pairs.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.sampling_params import SamplingParams
from replay import Lengths, on_the_engine, run_jobs, workload
from rich.console import Console
from rich.table import Table

BATCHES = (1, 8, 32)
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 96
TRACE = {"prompts": Lengths(4.0, 0.8, 256), "outputs": Lengths(3.0, 0.9, 128)}

console = Console(width=100)


class Ranks(DistributedExecutor):
    """Real ranks; counts their steps, and those that were sent while another ran."""

    num_steps = num_ahead = 0

    def submit(self, step: Step) -> None:
        self.num_steps += 1
        self.num_ahead += not self.can_submit
        super().submit(step)


class OneAtATime(Ranks):
    can_submit_ahead = False


@contextmanager
def engine(arguments: argparse.Namespace, make: Callable[[], Ranks]) -> Iterator[Engine]:
    config = EngineConfig().with_keys(
        model=arguments.model,
        load_format="dummy",
        dtype="bfloat16",
        device=arguments.device,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=max(BATCHES) * PROMPT_TOKENS,
        prefix_caching=False,
    )
    served = Engine(config, make_executor=make)
    try:
        yield served
    finally:
        served.close()


def decode_rate(served: Engine, batch: int) -> float:
    """Tokens/s from the moment when every job has its first one."""
    rng = random.Random(batch)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    prompts = [[rng.randrange(300, 50000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    stats = [answer.stats for answer in run_jobs(served, [(p, params) for p in prompts])]
    first_s = max(one.first_token_s or 0.0 for one in stats)
    last_s = max(one.last_token_s or 0.0 for one in stats)
    return batch * (OUTPUT_TOKENS - 1) / (last_s - first_s)


def latencies_ms(served: Engine, rate: float, num_jobs: int, seed: int) -> tuple[float, float]:
    """Means over the jobs of a trace: until the first token, and of latency for each token."""
    records = on_the_engine(served, workload(rate, num_jobs, seed, **TRACE))
    first = statistics.mean(one.first_token_s - one.arrival_s for one in records)
    normalized = statistics.mean(
        (one.last_token_s - one.arrival_s) / one.output_tokens for one in records
    )
    return first * 1e3, normalized * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rate", type=float, default=3.0, help="jobs/s of the trace")
    parser.add_argument("--jobs", type=int, default=60, help="of the trace")
    arguments = parser.parse_args()
    ranks: dict[str, Ranks] = {}

    def make(side: str, kind: type[Ranks]) -> Callable[[], Ranks]:
        def start() -> Ranks:
            ranks[side] = kind()
            return ranks[side]

        return start

    with ExitStack() as stack:
        sides = {
            "one at a time": stack.enter_context(engine(arguments, make("one", OneAtATime))),
            "ahead": stack.enter_context(engine(arguments, make("ahead", Ranks))),
        }
        figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for served in sides.values():
            decode_rate(served, 1)  # warm
        ranks["ahead"].num_steps = ranks["ahead"].num_ahead = 0
        for repeat in range(arguments.repeats):
            order = list(sides.items())[:: 1 if repeat % 2 else -1]
            for batch in BATCHES:
                for side, served in order:
                    rate = decode_rate(served, batch)
                    figures[f"decode, batch {batch}, tokens/s"][side].append(rate)
            for side, served in order:
                first, normalized = latencies_ms(served, arguments.rate, arguments.jobs, repeat)
                figures["trace, mean ms to the first token"][side].append(first)
                figures["trace, mean ms a token"][side].append(normalized)
    table = Table()
    for heading in ("", *sides, "ahead / one at a time"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, values in figures.items():
        one, ahead = (values[side] for side in sides)
        ratio = statistics.median(b / a for a, b in zip(one, ahead, strict=True))
        table.add_row(label, *map(summary, (one, ahead)), f"{ratio:.2f}")
    console.print(table)
    share = ranks["ahead"].num_ahead / ranks["ahead"].num_steps
    console.print(f"{share:.0%} of {ranks['ahead'].num_steps} steps were sent ahead")


def summary(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} [{min(values):.1f}, {max(values):.1f}]"


if __name__ == "__main__":
    main()
