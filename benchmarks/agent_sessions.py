"""How soon later turns of conversations have their first tokens, with and without sessions.

    python -m benchmarks.agent_sessions               # some minutes on two cores
    python -m benchmarks.agent_sessions --others 0    # nothing evicts kept blocks

The real engine with the embedded model on this machine's CPU. Two engines take turns: one gets a
``session_id``, both have prefix caching. Between two turns of a conversation, other jobs fill the
device's KV blocks. Answers of both are compared, so the type is float32: in 16 bits, rounding
decides some tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.job import ServiceLevel
from rich.console import Console

from benchmarks.replay import run_jobs

NUM_CONVERSATIONS, NUM_TURNS = 4, 4
FIRST_TOKENS, ADDED_TOKENS, ANSWER_TOKENS = 1500, 40, 16
DEVICE_BLOCKS = 300  # of 16 tokens: for two or three jobs
OTHER_TOKENS = 1200
console = Console(width=120)


def main() -> None:
    """Print how soon later turns have their first tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--others", type=int, default=4, help="other jobs in each pause")
    num_others = parser.parse_args().others
    keys: dict[str, Any] = {
        "device_blocks": DEVICE_BLOCKS,
        "swap_space_gib": 2.0,
        "max_num_seqs": 8,
        "dtype": "float32",
    }
    seconds: dict[str, list[float]] = {"plain": [], "session": []}
    with LLM(EMBEDDED_MODEL, **keys) as plain, LLM(EMBEDDED_MODEL, **keys) as with_sessions:
        sides = {"plain": plain, "session": with_sessions}
        for number in range(NUM_CONVERSATIONS):
            rngs = {name: random.Random(number) for name in sides}
            prompts: dict[str, list[int]] = {name: [] for name in sides}
            for turn in range(NUM_TURNS):
                for name, llm in sides.items():
                    rng = rngs[name]
                    prompts[name] += tokens(rng, ADDED_TOKENS if turn else FIRST_TOKENS)
                    session = f"c{number}" if name == "session" else ""
                    answer, first_s = run_turn(llm, prompts[name], session)
                    if turn:
                        seconds[name].append(first_s)
                    prompts[name] += answer
                    run_others(llm, rng, num_others)
            assert prompts["plain"] == prompts["session"], "sessions change answers"
        for name, llm in sides.items():
            counters = llm.engine.counters
            console.print(
                f"{name}: first tokens of later turns after {show_ms(seconds[name])}; "
                f"{counters.prefix_cached_tokens} tokens of kept prefixes, "
                f"{counters.session_hit_tokens} of sessions"
            )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    console.print(f"{medians['plain'] / medians['session']:.1f} x sooner, by the medians")


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 40_000) for _ in range(count)]


def run_turn(llm: LLM, prompt: list[int], session: str) -> tuple[list[int], float]:
    """The answer, and seconds until its first token."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    service = ServiceLevel(session_id=session)
    (answer,) = run_jobs(llm.engine, [(prompt, params)], service=service)
    assert answer.stats.first_token_s is not None
    return answer.token_ids, answer.stats.first_token_s - answer.stats.arrival_s


def run_others(llm: LLM, rng: random.Random, count: int) -> None:
    """The pause: other jobs need the device's blocks."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    jobs = [(tokens(rng, OTHER_TOKENS), params) for _ in range(count)]
    run_jobs(llm.engine, jobs)


def show_ms(seconds: Sequence[float]) -> str:
    low, high = min(seconds) * 1e3, max(seconds) * 1e3
    return f"{statistics.median(seconds) * 1e3:.0f} ms ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
