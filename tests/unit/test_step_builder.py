"""Steps as they go to the ranks, and a job's randomness."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
from fastserve_backend.engine.step_builder import build_step, in_step_order, uniform
from fastserve_backend.grammars.structured_output import StructuredOutput
from fastserve_backend.job import Job
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.rank_protocol.messages import PromptScores, Step, encoder, to_rank_decoder
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.token_rules import TokenRules
from jobs import make_job


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype=np.int32).tolist()


def held(pool: BlockPool, *jobs: Job) -> list[tuple[Job, int]]:
    """The jobs with all their uncomputed tokens, and with blocks for them."""
    for job in jobs:
        pool.grow(job.number, job.num_tokens)
    return [(job, job.num_uncomputed) for job in jobs]


def test_a_mixed_step_survives_the_wire() -> None:
    pool = BlockPool(8, 4)
    begins = make_job(1, 14)
    begins.num_shared = 8
    scheduled = held(pool, make_job(0, 5, computed=True), begins)
    step = to_rank_decoder.decode(encoder.encode(build_step(3, scheduled, pool)))
    assert isinstance(step, Step)
    assert (step.step_id, step.num_decodes, step.num_partial) == (3, 1, 0)
    assert ints(step.token_ids) == [7, 8, 9, 10, 11, 12, 13]
    assert ints(step.query_lens) == [1, 6]
    assert ints(step.starts) == [5, 8]
    assert ints(step.block_counts) == [2, 4]
    assert ints(step.block_ids) == [*pool.table(0), *pool.table(1)]
    assert step.sampling is not None  # the default temperature is 1


def test_a_dropped_job_is_sent_whole() -> None:
    pool = BlockPool(8, 4)
    job = make_job(0, 3, computed=True)
    job.output_ids.extend([8, 9])
    job.num_computed = 0
    step = build_step(0, held(pool, job), pool)
    assert ints(step.token_ids) == [0, 1, 2, 7, 8, 9]
    assert (step.num_decodes, step.num_partial) == (0, 0)
    job.num_computed = 2  # partly in the cache, across the end of the prompt
    assert list(job.uncomputed_ids()) == [2, 7, 8, 9]


def test_decodes_come_first_then_ending_prefills_then_those_that_go_on() -> None:
    begun = make_job(4, 9)
    begun.num_computed = 8  # its last chunk is one token: a decode to the ranks
    scheduled = [
        (make_job(0, 6), 4),
        (make_job(1, 6), 6),
        (make_job(2, 5, computed=True), 1),
        (make_job(3, 2), 1),
        (begun, 1),
        (make_job(5, 3), 3),
    ]
    assert [job.number for job, _ in in_step_order(scheduled)] == [2, 4, 1, 5, 0, 3]
    assert in_step_order([]) == []


def test_a_chunk_is_sent_with_its_place_and_samples_nothing_before_the_last() -> None:
    pool = BlockPool(8, 4)
    decoding, ending, begun = make_job(0, 5, computed=True), make_job(1, 9), make_job(2, 12)
    ending.num_computed, begun.num_computed = 4, 3
    held(pool, decoding, ending)
    pool.grow(begun.number, 8)
    step = build_step(0, [(decoding, 1), (ending, 5), (begun, 5)], pool)
    assert (step.num_decodes, step.num_partial) == (1, 1)
    assert ints(step.token_ids) == [7, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7]
    assert ints(step.query_lens) == [1, 5, 5]
    assert ints(step.starts) == [5, 4, 3]
    assert ints(step.block_counts) == [2, 3, 2]
    assert ints(step.block_ids) == [*pool.table(0), *pool.table(1), *pool.table(2)]
    assert step.sampling is not None
    assert len(np.frombuffer(step.sampling.temperature, "f4")) == 2  # rows that sample


def test_a_chunk_of_a_dropped_job_crosses_the_end_of_its_prompt() -> None:
    pool = BlockPool(8, 4)
    job = make_job(0, 3, computed=True)
    job.output_ids.extend([8, 9])
    job.num_computed = 0
    held(pool, job)
    step = build_step(0, [(job, 5)], pool)
    assert ints(step.token_ids) == [0, 1, 2, 7, 8]
    assert (step.num_decodes, step.num_partial) == (0, 1)
    assert step.sampling is None  # nothing is sampled


def test_tokens_of_a_prompt_are_scored_once_each() -> None:
    pool = BlockPool(8, 4)
    decoding, job = make_job(0, 5, computed=True), make_job(1, 9)
    scoring = Job("scoring", 1, job.prompt_ids, SamplingParams(prompt_logprobs=2), 0.0)
    assert scoring.prompt_logprobs is not None

    def wanted(num_tokens: int) -> tuple[int, list[int]] | None:
        """The first row, and the tokens."""
        held(pool, decoding, scoring)
        step = build_step(0, [(decoding, 1), (scoring, num_tokens)], pool)
        step = to_rank_decoder.decode(encoder.encode(step))
        assert isinstance(step, Step)
        scoring.on_sent(num_tokens)
        assert all((rows.job, rows.num_top) == (1, 2) for rows in step.prompt_rows)
        return next(((one.first_row, ints(one.token_ids)) for one in step.prompt_rows), None)

    assert wanted(4) == (1, [1, 2, 3, 4])
    assert scoring.needs_whole_prompt
    scoring.num_computed = 0  # it lost its KV
    assert wanted(3) is None
    assert wanted(3) == (2, [5, 6])  # behind the row of a token that is known
    scores = PromptScores(bytes(16), bytes(16), bytes(32), bytes(32))
    scoring.prompt_logprobs.on_scores(scores)
    scoring.on_ranks_lost()  # and the second step with them
    assert wanted(7) == (5, [5, 6, 7])
    assert wanted(1) == (1, [8])
    assert not scoring.needs_whole_prompt
    assert wanted(1) is None  # the last token's logits are those of the first output token


def test_a_pending_token_is_named_by_its_row_in_the_step_before() -> None:
    pool = BlockPool(8, 4)
    known, pending, ending = make_job(0, 3, computed=True), make_job(1, 5), make_job(2, 2)
    pending.params = SamplingParams(min_tokens=2, max_tokens=9)
    pending.seed = 5
    pending.on_sent(5)
    assert (pending.num_tokens, pending.num_outputs, pending.num_uncomputed) == (6, 1, 1)
    scheduled = held(pool, known, pending, ending)
    step = build_step(0, in_step_order(scheduled), pool, {1: 3, 7: 0})
    assert ints(step.previous_rows) == [-1, 3]
    assert ints(step.token_ids) == [7, 0, 0, 1]
    assert ints(step.starts) == [3, 5, 0]
    assert step.sampling is not None
    # The row samples its second token, and one of at least two is known or pending.
    assert np.frombuffer(step.sampling.uniform, "f8")[1] == uniform(5, 1)
    assert np.frombuffer(step.sampling.no_eos, "?").tolist() == [False, True, False]
    pending.on_sent(1)
    assert (pending.num_pending, pending.num_computed, pending.num_uncomputed) == (2, 6, 1)
    pending.output_ids.append(8)
    pending.num_pending -= 1
    assert pending.num_outputs == 2


def test_steps_that_take_nothing_from_others_do_not_say_so() -> None:
    pool = BlockPool(8, 4)
    job = make_job(0, 3, computed=True)
    assert build_step(0, held(pool, job), pool).previous_rows == b""
    assert ints(build_step(0, [(job, 1)], pool, {}).previous_rows) == [-1]


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


def test_masks_and_biases_of_the_jobs_that_get_a_token() -> None:
    pool = BlockPool(16, 4)
    jobs = [make_job(number, 5, computed=True) for number in range(3)]
    wanted = StructuredOutput(regex="a*")
    for job in jobs[1:]:
        job.params = SamplingParams(temperature=0, structured_output=wanted)
    jobs[0].params = SamplingParams(temperature=0, logit_bias={7: -1.5, 3: 100.0})
    jobs[1].mask, jobs[2].mask = b"\x01\x00\x00\x80", b"\x02\x00\x00\x00"
    partial = make_job(3, 9)
    partial.params, partial.mask = jobs[1].params, b"\xff" * 4
    scheduled = [*held(pool, *jobs), *((job, 4) for job, _ in held(pool, partial))]
    step = to_rank_decoder.decode(encoder.encode(build_step(0, scheduled, pool)))
    assert isinstance(step, Step)
    assert step.sampling is not None
    assert ints(step.sampling.masked_rows) == [1, 2]
    assert step.sampling.masks == b"\x01\x00\x00\x80\x02\x00\x00\x00"
    (bias,) = step.sampling.biases
    assert (bias.row, ints(bias.token_ids)) == (0, [7, 3])
    assert np.frombuffer(bias.values, np.float32).tolist() == [-1.5, 100.0]


def test_rules_of_a_request_are_bans_and_a_mask() -> None:
    pool = BlockPool(16, 4)
    bans, masks, free = (make_job(number, 5, computed=True) for number in range(3))
    for job in (bans, masks, free):
        job.params = SamplingParams(temperature=0)
    bans.params = replace(bans.params, logit_bias={5: 2.0})
    bans.rules = TokenRules(32, None, [[4], [7, 3], [8, 7, 5], [8, 6]], [], 0)
    masks.rules, masks.mask = TokenRules(32, [1], [], [], 0), b"\x02\x00\x00\x00"
    free.rules = TokenRules(32, None, [[9, 9]], [], 0)
    step = build_step(0, held(pool, bans, masks, free), pool)
    assert step.sampling is not None
    (bias,) = step.sampling.biases  # the output is 7
    assert bias.row == 0
    biases = dict(zip(ints(bias.token_ids), np.frombuffer(bias.values, np.float32), strict=True))
    assert biases == {5: 2.0, 4: -math.inf, 3: -math.inf}
    assert ints(step.sampling.masked_rows) == [1]
    bans.output_ids = array("i", [8, 7])
    step = build_step(1, held(pool, bans), pool)
    assert step.sampling is not None
    assert sorted(ints(step.sampling.biases[0].token_ids)) == [3, 4, 5]


def test_min_p_is_sent_if_a_job_has_one() -> None:
    pool = BlockPool(16, 4)
    plain, other = make_job(0, 5, computed=True), make_job(1, 5, computed=True)
    step = build_step(0, held(pool, plain, other), pool)
    assert step.sampling is not None
    assert step.sampling.min_p == b""
    other.params = SamplingParams(min_p=0.25)
    step = build_step(1, held(pool, plain, other), pool)
    assert step.sampling is not None
    assert np.frombuffer(step.sampling.min_p, np.float32).tolist() == [0.0, 0.25]


def test_stop_tokens_are_banned_below_min_tokens() -> None:
    pool = BlockPool(16, 4)
    below, above = make_job(0, 5, computed=True), make_job(1, 5, computed=True)
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stop_token_ids": [3, 7]}
    below.params = SamplingParams(min_tokens=2, logit_bias={3: 100.0, 5: -1.5}, **options)
    above.params = SamplingParams(min_tokens=1, **options)
    step = build_step(0, held(pool, below, above), pool)
    assert step.sampling is not None
    (bias,) = step.sampling.biases
    biases = dict(zip(ints(bias.token_ids), np.frombuffer(bias.values, np.float32), strict=True))
    assert (bias.row, biases) == (0, {3: -math.inf, 5: -1.5, 7: -math.inf})
    below.output_ids.append(9)  # its second token: the third may be any
    assert build_step(1, held(pool, above), pool).sampling is None
    below.params = replace(below.params, logit_bias=None)
    assert build_step(1, held(pool, below, above), pool).sampling is None
