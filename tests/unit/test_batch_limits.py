"""Limits derived from the latency profile, the KV memory and the SLO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.scheduler.base import BatchLimits, ChunkSizes
from fastserve_backend.scheduler.batch_limits import batch_limits


@dataclass
class Machine(LatencyModel):
    """A machine that reads its weights in ``read_s``, and computes up to ``knee`` tokens in that
    time."""

    read_s: float = 0.02
    knee: int = 100
    context_s: float = 0.0
    overhead_s: float = 0.0

    def iteration_s(self, load: IterationLoad) -> float:
        compute_s = self.read_s * load.num_tokens / self.knee
        busy_s = max(self.read_s, compute_s) + self.context_s * load.decode_context
        return self.overhead_s + busy_s

    def score_s(self, num_tokens: int) -> float:
        return self.read_s * num_tokens / self.knee


def limits(machine: Machine | None = None, kv_tokens: int = 10**6, **keys: Any) -> BatchLimits:
    config = EngineConfig().with_keys(**keys).scheduler
    return batch_limits(config, machine or Machine(), max_model_len=2048, kv_tokens=kv_tokens)


# --- Seats ------------------------------------------------------------------------------------


def test_seats_are_as_many_as_memory_and_objective_allow() -> None:
    assert limits().max_seqs == 256
    assert limits(kv_tokens=3200).max_seqs == 50  # of 64 tokens each
    assert limits(kv_tokens=10).max_seqs == 1
    # A full memory of 20,000 tokens takes 10 ms of 50, and each row 0.2 ms.
    slow = Machine(context_s=5e-7)
    assert limits(slow, kv_tokens=20_000, slo_ms=150).max_seqs == 200
    assert limits(max_num_batched_tokens=100).max_seqs == 100
    assert limits(kv_tokens=10, max_num_seqs=16).max_seqs == 16


def test_a_slow_machine_batches_all_the_same() -> None:
    """If one decode takes longer than the objective allows, a batch may take twice its time."""
    assert limits(Machine(read_s=2.0), slo_ms=100).max_seqs == 200


# --- Chunks -----------------------------------------------------------------------------------


def test_chunks_begin_at_the_knee_and_end_where_the_objective_does() -> None:
    sizes = limits(slo_ms=300).chunk_sizes
    assert sizes is not None
    assert min(sizes.seconds) == 125  # 25 ms: a quarter more than a decode
    assert max(sizes.seconds) == 500  # 100 ms: a third of the objective
    assert limits(slo_ms=1).prefill_chunk_tokens == 200  # two decodes, whatever the objective


def test_chunks_leave_tokens_for_the_decodes_beside_them() -> None:
    fast = Machine(knee=10**6)
    assert limits(fast, max_num_seqs=48).prefill_chunk_tokens == 2048 - 47
    assert limits(fast, max_num_seqs=48, prefill_chunk_tokens=2048).prefill_chunk_tokens == 2001


def test_a_chunk_that_was_set_stays() -> None:
    fixed = limits(prefill_chunk_tokens=512)
    assert (fixed.prefill_chunk_tokens, fixed.chunk_sizes) == (512, None)
    assert fixed.for_load(1000, 0) is fixed


@pytest.mark.parametrize(
    ("num_prompts", "num_decodes", "size"),
    [
        (0, 50, 100),  # decodes alone: the free tokens
        (1, 50, 100),
        (50, 1, 400),  # prompts alone: the efficient size
        (50, 0, 400),
        (0, 0, 100),
    ],
)
def test_the_chunk_that_delays_jobs_least(num_prompts: int, num_decodes: int, size: int) -> None:
    """Beyond 100 tokens an iteration takes 0.2 ms a token, and it begins with 25 ms."""
    seconds = {tokens: 0.025 + 0.0002 * (tokens - 100) for tokens in (100, 200, 400)}
    sizes = ChunkSizes(seconds, decode_s=0.025)
    assert sizes.best(num_prompts, num_decodes) == size

    def delay(tokens: int) -> float:
        """The delay of all jobs for each prefill token. Decodes get their own tokens meanwhile."""
        num_jobs = num_prompts + num_decodes
        return (num_jobs * seconds[tokens] - num_decodes * 0.025) / tokens

    assert delay(size) == min(map(delay, seconds))


@pytest.mark.parametrize("keys", [{"slo_ms": 300}, {"prefill_chunk_tokens": 512}], ids=str)
def test_with_log_probabilities_a_chunk_takes_no_longer(keys: dict[str, Any]) -> None:
    machine = Machine(overhead_s=0.005)
    wanted = limits(machine, **keys)
    sizes = wanted.chunk_sizes.seconds if wanted.chunk_sizes else [512]
    assert set(wanted.scored_chunks) == set(sizes)
    for size, scored in wanted.scored_chunks.items():
        for more in (0, 1):
            num_tokens = scored + more
            seconds = machine.prefill_s(num_tokens) + machine.score_s(num_tokens)
            longest_s = max(machine.prefill_s(size), 1.25 * machine.decode_s(1))
            assert (seconds <= longest_s) == (more == 0), size
    auto = limits(machine, slo_ms=300)
    assert auto.for_load(1, 1).scored_chunks == auto.scored_chunks
    assert limits(prefill_chunk_tokens="whole").scored_chunks == {}


def test_log_probabilities_may_take_as_long_as_the_smallest_chunk() -> None:
    """A chunk that takes no longer than a decode would leave no time for any."""
    wanted = limits(Machine(), prefill_chunk_tokens=16)
    assert wanted.scored_chunks == {16: 16}  # 20 ms for the weights, and 3.2 of 5 for the rest


def test_an_iteration_takes_the_chunk_of_its_load() -> None:
    auto = limits(Machine(overhead_s=0.005))
    assert auto.chunk_sizes is not None
    few, many = auto.for_load(1, 200), auto.for_load(200, 1)
    assert few.prefill_chunk_tokens == min(auto.chunk_sizes.seconds)
    assert many.prefill_chunk_tokens == max(auto.chunk_sizes.seconds)
    assert "prefill in chunks of 131 to 475" in auto.describe()
