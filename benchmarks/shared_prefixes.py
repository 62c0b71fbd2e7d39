"""What it brings that jobs side by side have the KV of their common beginning from one of them.

    python benchmarks/shared_prefixes.py                  # two minutes
    python benchmarks/shared_prefixes.py --device cuda

Two engines of OPT-125M with random weights take turns: one with prefix caching and one without.
Jobs come all at once, with a beginning that no earlier ones had, so that nothing kept helps.
Figures are medians of the repeats, with the least and the most in brackets; ratios are medians of
those of the pairs.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.sampling_params import SamplingParams
from replay import run_jobs
from rich.console import Console
from rich.table import Table


class Burst(NamedTuple):
    num_jobs: int
    common_tokens: int
    own_tokens: int

    def describe(self) -> str:
        if self.own_tokens == 0:
            return f"{self.num_jobs} answers to {self.common_tokens} tokens"
        return f"{self.num_jobs} jobs, {self.common_tokens} tokens in common, {self.own_tokens} own"


BURSTS = (
    Burst(4, 800, 0),
    Burst(8, 800, 20),
    Burst(8, 200, 100),
    Burst(8, 64, 100),
    Burst(8, 16, 100),
    Burst(8, 0, 200),
)
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)

console = Console(width=100)


@contextmanager
def engine(arguments: argparse.Namespace, prefix_caching: bool) -> Iterator[Engine]:
    config = EngineConfig().with_keys(
        model=arguments.model,
        load_format="dummy",
        dtype="bfloat16",
        device=arguments.device,
        prefix_caching=prefix_caching,
    )
    served = Engine(config)
    try:
        yield served
    finally:
        served.close()


def mean_first_token_ms(served: Engine, burst: Burst, rng: random.Random) -> float:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(300, 50000) for _ in range(count)]

    common = tokens(burst.common_tokens)
    prompts = [common + tokens(burst.own_tokens) for _ in range(burst.num_jobs)]
    stats = [answer.stats for answer in run_jobs(served, [(prompt, PARAMS) for prompt in prompts])]
    return 1e3 * statistics.mean((one.first_token_s or 0.0) - one.arrival_s for one in stats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    figures: dict[Burst, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        sides = {
            "each computes": stack.enter_context(engine(arguments, prefix_caching=False)),
            "one computes": stack.enter_context(engine(arguments, prefix_caching=True)),
        }
        for served in sides.values():
            mean_first_token_ms(served, BURSTS[-1], random.Random(0))  # warm
        for repeat in range(arguments.repeats):
            order = list(sides.items())[:: 1 if repeat % 2 else -1]
            for burst in BURSTS:
                for side, served in order:
                    rng = random.Random(f"{repeat} {burst}")
                    figures[burst][side].append(mean_first_token_ms(served, burst, rng))
    table = Table(title="Mean ms to the first token")
    for heading in ("", *sides, "each / one"):
        table.add_column(heading, justify="right" if heading else "left")
    for burst, values in figures.items():
        each, one = (values[side] for side in sides)
        ratio = statistics.median(a / b for a, b in zip(each, one, strict=True))
        table.add_row(burst.describe(), *map(summary, (each, one)), f"{ratio:.2f}")
    console.print(table)


def summary(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} [{min(values):.0f}, {max(values):.0f}]"


if __name__ == "__main__":
    main()
