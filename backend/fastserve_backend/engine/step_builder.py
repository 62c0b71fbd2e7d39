"""Encode steps and copies as messages for the ranks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from fastserve_backend.job import Job
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.transfers import DiskTransfer, Transfer
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    DiskCopy,
    LogitBias,
    Penalties,
    PromptRows,
    Sampling,
    Step,
)
from fastserve_backend.scheduler.base import Scheduled

_UINT64_MAX = 2**64 - 1
_PENDING = array("i", [0])  # in place of a token whose value only the ranks know yet


def in_step_order(scheduled: Iterable[Scheduled]) -> list[Scheduled]:
    """Decodes first, then prefills that end in this step, then prefills that go on later."""
    decodes, last_chunks, partial = [], [], []
    for item in scheduled:
        job, num_tokens = item
        if job.num_uncomputed == 1:
            decodes.append(item)
        elif job.num_uncomputed == num_tokens:
            last_chunks.append(item)
        else:
            partial.append(item)
    return decodes + last_chunks + partial


def build_step(
    step_id: int,
    scheduled: Sequence[tuple[Job, int]],
    pool: BlockPool,
    previous_rows: Mapping[int, int] | None = None,
    rotary_switch: int | None = None,
) -> Step:
    """A step that runs these jobs.

    Args:
        scheduled: jobs and numbers of uncomputed tokens to run, in the step's order.
        pool: has the jobs' block tables.
        previous_rows: for a step sent behind a running one: the row of each job, by its number, in
            the running step's result. Pending tokens are taken from there.
        rotary_switch: of the model.
    """
    num_decodes = num_partial = 0
    token_ids, query_lens, starts = array("i"), array("i"), array("i")
    rows = array("i")
    prompt_rows: list[PromptRows] = []
    for place, (job, num_tokens) in enumerate(scheduled):
        if job.num_pending:
            assert previous_rows is not None
            ids, row = _PENDING, previous_rows[job.number]
        else:
            ids, row = job.uncomputed_ids(), -1
        if len(ids) == 1:
            num_decodes += 1
            rows.append(row)
        num_partial += len(ids) > num_tokens
        ids = ids[:num_tokens]
        if job.prompt_logprobs is not None:
            positions = job.prompt_logprobs.rows(job.num_ready, num_tokens)
            if positions:
                first_row = len(token_ids) + positions.start - job.num_ready
                wanted = job.prompt_ids[positions.start + 1 : positions.stop + 1]
                num_top = job.prompt_logprobs.num_top
                prompt_rows.append(PromptRows(place, first_row, wanted.tobytes(), num_top))
        token_ids.extend(ids)
        query_lens.append(len(ids))
        starts.append(job.num_ready)
    block_counts, block_ids, first_blocks = array("i"), array("i"), array("i")
    for kind in range(len(pool.kinds)):
        for job, _ in scheduled:
            table = pool.table(job.number, kind)
            block_counts.append(len(table))
            block_ids.extend(table)
            if pool.has_windows:
                first_blocks.append(pool.first(job.number, kind))
    return Step(
        step_id=step_id,
        num_decodes=num_decodes,
        num_partial=num_partial,
        token_ids=token_ids.tobytes(),
        query_lens=query_lens.tobytes(),
        starts=starts.tobytes(),
        block_counts=block_counts.tobytes(),
        block_ids=block_ids.tobytes(),
        sampling=_sampling([job for job, _ in scheduled[: len(scheduled) - num_partial]]),
        previous_rows=b"" if previous_rows is None else rows.tobytes(),
        first_blocks=first_blocks.tobytes(),
        are_long=b""
        if rotary_switch is None
        else bytes(job.num_tokens > rotary_switch for job, _ in scheduled),
        prompt_rows=prompt_rows,
    )


def build_copy(transfer: Transfer, block_size: int) -> CopyBlocks:
    return CopyBlocks(
        transfer_id=transfer.id,
        is_out=transfer.kind.is_out,
        device_blocks=transfer.device_blocks.tobytes(),
        host_blocks=transfer.host_blocks.tobytes(),
        num_last_tokens=(transfer.num_tokens - 1) % block_size + 1,
        num_last=transfer.num_last,
    )


def build_disk_copy(transfer: DiskTransfer) -> DiskCopy:
    return DiskCopy(
        transfer_id=transfer.id,
        is_write=transfer.is_write,
        host_blocks=transfer.host_blocks.tobytes(),
        slots=transfer.slots.tobytes(),
    )


def _sampling(jobs: Sequence[Job]) -> Sampling | None:
    """None if each job takes its most likely token and needs nothing else from the sampler."""
    if all(_is_plain_greedy(job) for job in jobs):
        return None
    params = [job.params for job in jobs]
    masks = {row: job.mask for row, job in enumerate(jobs) if job.mask is not None}
    return Sampling(
        temperature=np.array([0 if p.greedy else p.temperature for p in params], "f4").tobytes(),
        top_k=np.array([max(0, p.top_k) for p in params], "i4").tobytes(),
        top_p=np.array([p.top_p for p in params], "f4").tobytes(),
        uniform=np.array(
            [uniform(job.seed, job.num_earlier + job.num_outputs) for job in jobs], "f8"
        ).tobytes(),
        no_eos=np.array([_must_not_end(job) for job in jobs], "?").tobytes(),
        num_logprobs=np.array(
            [-1 if p.logprobs is None else p.logprobs for p in params], "i4"
        ).tobytes(),
        penalties=[
            Penalties(
                row=row,
                repetition=p.repetition_penalty,
                presence=p.presence_penalty,
                frequency=p.frequency_penalty,
                prompt_ids=_penalized_prompt(job),
                output_ids=job.answer_ids.tobytes(),
                is_pending=job.num_pending > 0,
            )
            for row, (job, p) in enumerate(zip(jobs, params, strict=True))
            if p.has_penalties
        ],
        biases=[
            LogitBias(
                row=row,
                token_ids=np.array(list(biases), "i4").tobytes(),
                values=np.array(list(biases.values()), "f4").tobytes(),
            )
            for row, job in enumerate(jobs)
            if (biases := _biases(job))
        ],
        masked_rows=np.array(list(masks), "i4").tobytes(),
        masks=b"".join(masks.values()),
        min_p=np.array([p.min_p for p in params], "f4").tobytes()
        if any(p.min_p for p in params)
        else b"",
    )


def _penalized_prompt(job: Job) -> bytes:
    if job.params.repetition_penalty == 1.0:
        return b""
    return job.prompt_ids[: len(job.prompt_ids) - job.num_earlier].tobytes()


def _is_plain_greedy(job: Job) -> bool:
    params = job.params
    return (
        params.greedy
        and params.logprobs is None
        and not params.has_penalties
        and job.rules is None
        and not _biases(job)
        and params.structured_output is None
        and not _must_not_end(job)
    )


def _must_not_end(job: Job) -> bool:
    return job.num_outputs < job.params.min_tokens and not job.params.ignore_eos


def _biases(job: Job) -> Mapping[int, float]:
    """Biases to add to the job's logits, by token id."""
    params = job.params
    biases = params.logit_bias or {}
    banned: Collection[int] = ()
    if job.rules is not None:
        banned = job.rules.banned_after(job.answer_ids)
    if params.stop_token_ids and job.num_outputs < params.min_tokens:
        banned = {*banned, *params.stop_token_ids}
    if not banned:
        return biases  # called for each job in each step, so without a copy
    return {**biases, **dict.fromkeys(banned, -math.inf)}


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for token ``index`` of an answer: SplitMix64 (Steele et al. 2014) of both.

    It depends on seed and index alone. So a job's tokens do not depend on the other jobs of its
    batch, and a job that is recomputed, or continued elsewhere, draws the same numbers.
    """
    # The seed is scrambled first. Otherwise neighbouring seeds draw shifted copies of one sequence.
    return (_mix(_mix(seed) + index * 0x9E3779B97F4A7C15) >> 11) / 2**53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _UINT64_MAX
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MAX
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64_MAX
    return value ^ (value >> 31)
