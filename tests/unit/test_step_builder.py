"""What goes to the ranks, and the randomness of a job."""

from __future__ import annotations

import numpy as np
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.step_builder import build_step, uniform
from fastserve_backend.worker.messages import Step, encoder, to_rank_decoder
from jobs import make_job


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype=np.int32).tolist()


def test_a_mixed_step_survives_the_wire() -> None:
    pool = BlockPool(8, 4)
    decoding, fresh = make_job(0, 5, computed=True), make_job(1, 6)
    for job in (decoding, fresh):
        pool.grow(job.number, job.num_tokens)
    step = to_rank_decoder.decode(encoder.encode(build_step(3, [decoding, fresh], 1, pool)))
    assert isinstance(step, Step)
    assert (step.step_id, step.num_decodes) == (3, 1)
    assert ints(step.token_ids) == [7, 0, 1, 2, 3, 4, 5]
    assert ints(step.query_lens) == [1, 6]
    assert ints(step.starts) == [5, 0]
    assert ints(step.block_counts) == [2, 2]
    assert ints(step.block_ids) == [*pool.table(0), *pool.table(1)]
    assert step.sampling is not None  # the default temperature is 1


def test_a_dropped_job_is_sent_whole() -> None:
    pool = BlockPool(8, 4)
    job = make_job(0, 3, computed=True)
    job.output_ids.extend([8, 9])
    job.num_computed = 0
    pool.grow(0, job.num_tokens)
    step = build_step(0, [job], 0, pool)
    assert ints(step.token_ids) == [0, 1, 2, 7, 8, 9]
    job.num_computed = 2  # partly in the cache, across the end of the prompt
    assert list(job.uncomputed_ids()) == [2, 7, 8, 9]


def test_uniform_numbers_are_reproducible_spread_out_and_unrelated_between_seeds() -> None:
    numbers = np.array([[uniform(seed, index) for index in range(500)] for seed in range(40)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert uniform(3, 7) == numbers[3, 7]
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert (np.abs(counts - 1000) < 150).all()  # 5 standard deviations of 31
    correlation = np.corrcoef(numbers)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.25
    shifted = np.corrcoef(numbers[:-1, 1:].ravel(), numbers[1:, :-1].ravel())[0, 1]
    assert abs(shifted) < 0.05
