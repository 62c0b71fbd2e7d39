"""What jobs that begin alike cost on a device that has room for their beginning once.

    python -m benchmarks.shared_beginnings               # some minutes on two quiet cores
    python -m benchmarks.shared_beginnings --rounds 3
    python -m benchmarks.shared_beginnings --layers 2    # on a busy machine

The real engine with OPT-125M's shape and random weights on this machine's CPU. The prompts of 24
jobs have 1,600 common tokens and 20 own ones. All jobs arrive at once, and each makes 64 tokens.
Two engines take turns: one has 330 KV blocks of 16 tokens, the other has room for 24 copies of
everything. Each round has new prompts, the same for both engines, so no KV of earlier rounds fits.

Printed are, for each engine:

* the makespan in seconds, from the first job's arrival to the last one's end: its median over the
  rounds, and its range;
* the most device blocks in use at once, and how many times that is of what the jobs need if they
  share the common blocks by reference: the common blocks once, and each job's own blocks;
* the iterations of all rounds, which do not depend on how busy the machine is;
* the share of prompt tokens that were not computed because their KV was there, and the jobs that
  lost their KV and computed it again.

The makespans of each round are printed when it ends. After the table comes the ratio of the
makespans, few blocks over plenty: its median over the rounds, and its range. The type is float32,
and the answers of both engines are compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastserve_backend import LLM, SamplingParams
from rich.console import Console
from rich.table import Table
from transformers import OPTConfig

from benchmarks.agent_sessions import tokens
from benchmarks.replay import run_jobs

NUM_JOBS = 24
COMMON_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 1600, 20, 64
BLOCK_SIZE = 16
OWN_BLOCKS = -(-(OWN_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE)
NEEDED_BLOCKS = COMMON_TOKENS // BLOCK_SIZE + NUM_JOBS * OWN_BLOCKS
FEW_BLOCKS = 330
# A copy of everything for each job, and one to spare.
PLENTY_BLOCKS = (NUM_JOBS + 1) * (COMMON_TOKENS // BLOCK_SIZE + OWN_BLOCKS)
DEADLINE_S = 1800.0  # of one engine's round
console = Console(width=120)


@dataclass(slots=True)
class Side:
    """An engine, and how long its rounds took."""

    llm: LLM
    makespans_s: list[float] = field(default_factory=list)

    def serve(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The answers."""
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        answers = run_jobs(self.llm.engine, [(prompt, params) for prompt in prompts], DEADLINE_S)
        ends_s = [answer.stats.last_token_s for answer in answers]
        first_s = min(answer.stats.arrival_s for answer in answers)
        self.makespans_s.append(max(end_s for end_s in ends_s if end_s is not None) - first_s)
        return [answer.token_ids for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--rounds", type=int, default=5, help="of each engine")
    arguments = parser.parse_args()
    keys: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_num_seqs": NUM_JOBS,
    }
    with tempfile.TemporaryDirectory() as directory:
        OPTConfig(num_hidden_layers=arguments.layers).save_pretrained(directory)
        with (
            LLM(directory, device_blocks=FEW_BLOCKS, **keys) as few,
            LLM(directory, device_blocks=PLENTY_BLOCKS, **keys) as plenty,
        ):
            sides = {FEW_BLOCKS: Side(few), PLENTY_BLOCKS: Side(plenty)}
            # Every round runs, also after one with different answers.
            is_same = [serve_round(sides, number) for number in range(arguments.rounds)]
            console.print(table(sides))
    ratios = [
        few_s / plenty_s
        for few_s, plenty_s in zip(*(side.makespans_s for side in sides.values()), strict=True)
    ]
    console.print(f"makespan, few blocks over plenty: {median_and_range(ratios)}")
    console.print(
        f"The answers of both engines are {'the same' if all(is_same) else 'NOT the same'}."
    )


def serve_round(sides: dict[int, Side], number: int) -> bool:
    """Whether both engines gave the same answers."""
    rng = random.Random(number)
    common = tokens(rng, COMMON_TOKENS)
    prompts = [common + tokens(rng, OWN_TOKENS) for _ in range(NUM_JOBS)]
    order = list(sides.values())
    if number % 2:
        order.reverse()
    first, second = (side.serve(prompts) for side in order)
    makespans = ", ".join(
        f"{num_blocks:,} blocks {side.makespans_s[-1]:.2f} s" for num_blocks, side in sides.items()
    )
    console.print(f"round {number + 1}: {makespans}")
    return first == second


def table(sides: dict[int, Side]) -> Table:
    table = Table(title=f"{NUM_JOBS} jobs; references need {NEEDED_BLOCKS} blocks")
    headings = ("blocks", "makespan, s", "most in use", "x need", "iterations")
    for heading in (*headings, "not computed", "computed again"):
        table.add_column(heading, justify="right")
    for num_blocks, side in sides.items():
        counters = side.llm.engine.counters
        table.add_row(
            f"{num_blocks:,}",
            median_and_range(side.makespans_s),
            f"{counters.peak_blocks:,}",
            f"{counters.peak_blocks / NEEDED_BLOCKS:.2f}",
            f"{counters.iterations:,}",
            f"{counters.prefix_cached_tokens / counters.prompt_tokens:.0%}",
            str(counters.recomputed_jobs),
        )
    return table


def median_and_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
