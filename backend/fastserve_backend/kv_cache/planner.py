"""Give the selected jobs the KV blocks of their next iteration, from others if need be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from fastserve_backend.job import Job
from fastserve_backend.kv_cache.blocks import BlockPool


@dataclass(slots=True)
class KVPlan:
    """What the cache decided for one iteration; the engine carries it out."""

    scheduled: list[tuple[Job, int]] = field(default_factory=list)
    """Jobs whose blocks are all allocated, with the tokens to run, in order of priority."""
    dropped: list[Job] = field(default_factory=list)
    """Jobs that lost their blocks; they compute their KV again (strategy ``recompute``)."""


def plan(
    selected: Sequence[tuple[Job, int]],
    by_lowest_priority: Iterable[Job],
    pool: BlockPool,
    in_flight: Collection[int] = (),
) -> KVPlan:
    """Allocate blocks for ``selected``, dropping the KV of the least urgent jobs when short.

    ``selected`` holds jobs and the number of tokens to run, most urgent first;
    ``by_lowest_priority`` yields all unfinished jobs, least urgent first, and is read only when
    blocks are short; ``in_flight`` holds the numbers of jobs that a running step uses. A job takes
    blocks only from less urgent jobs that are not in flight, and only if that makes it fit; else it
    waits and keeps its place. With nothing in flight the most urgent job of all always fits, since
    admission refuses a job that the whole pool cannot hold: there is always progress. While a job
    waits for blocks of those in flight, less urgent ones get no new blocks, or it would wait for
    ever.
    """
    result = KVPlan()
    chosen = {job.number for job, _ in selected}
    dropped: set[int] = set()
    waits_for_flight = False
    ranking: list[Job] | None = None  # least urgent first: holders of blocks, and the selected
    for job, num_tokens in selected:
        if job.number in dropped:
            continue
        missing = pool.missing(job.number, job.num_computed + num_tokens)
        if missing > 0 and waits_for_flight:
            continue
        shortage = missing - pool.num_free
        if shortage > 0:
            if ranking is None:
                ranking = [
                    other
                    for other in by_lowest_priority
                    if (other.number in chosen or pool.num_held(other.number))
                    and other.number not in in_flight
                ]
            victims = _victims_below(job, shortage, ranking, pool)
            if victims is None:
                waits_for_flight = len(in_flight) > 0
                continue
            for victim in victims:
                pool.release(victim.number)
                dropped.add(victim.number)
            result.dropped.extend(victims)
        pool.grow(job.number, job.num_computed + num_tokens)
        result.scheduled.append((job, num_tokens))
    return result


def _victims_below(
    job: Job, shortage: int, ranking: Sequence[Job], pool: BlockPool
) -> list[Job] | None:
    """The least urgent jobs below ``job`` that hold ``shortage`` blocks; None if too few do."""
    victims: list[Job] = []
    for other in ranking:
        if other is job or shortage <= 0:
            break
        held = pool.num_held(other.number)
        if held:
            victims.append(other)
            shortage -= held
    return victims if shortage <= 0 else None
