"""What the jobs of each class, and of each tenant, got."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastserve_bench.outcome import Failure, LoadOutcome
from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.summary import Distribution
from fastserve_bench.workload import ServiceClass


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Some jobs of one or more runs, all of them together.

    Rates are over the time in which the group had jobs: from its first arrival to its last token.
    """

    num_jobs: int
    """Jobs that were sent."""
    num_failed: int
    ttft_kept: float | None
    """Share of the jobs with an objective for it that kept it. Failed jobs kept none. ``None``: no
    job has one."""
    tpot_kept: float | None
    """A job with one token has no TPOT, and does not count."""
    goodput_jobs_per_s: float
    """Finished jobs that kept all objectives that they had, per second."""
    tokens_per_s: float
    """Tokens of prompts and outputs of finished jobs."""
    ttft_s: Distribution | None
    """``None``: no job finished."""
    tpot_s: Distribution | None


@dataclass(slots=True)
class _Group:
    records: list[JobRecord] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def group_summaries(
    outcomes: Sequence[LoadOutcome], key_of: Callable[[ServiceClass], str]
) -> dict[str, GroupSummary]:
    """The jobs of all runs by ``key_of`` their class, in the order of the keys."""
    runs: dict[str, list[_Group]] = defaultdict(list)
    for outcome in outcomes:
        groups: dict[str, _Group] = defaultdict(_Group)
        for record in outcome.records:
            groups[key_of(record.service)].records.append(record)
        for failure in outcome.failures:
            groups[key_of(failure.service)].failures.append(failure)
        for key, group in groups.items():
            runs[key].append(group)
    return {key: _summarize(runs[key]) for key in sorted(runs)}


def jain_index(summaries: Mapping[str, GroupSummary]) -> float | None:
    """Jain's index of the tenants' tokens per second: 1 is equal, 1 / tenants is the worst.

    ``None`` for one tenant, and without tokens.
    """
    rates = [one.tokens_per_s for one in summaries.values()]
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if len(rates) > 1 and squares else None


def _summarize(groups: Sequence[_Group]) -> GroupSummary:
    records = [record for group in groups for record in group.records]
    failures = [failure for group in groups for failure in group.failures]
    duration_s = sum(map(_duration_s, groups))
    tpots_s = [record.tpot_s for record in records if record.tpot_s is not None]
    good = sum(_keeps_all(record) for record in records)
    tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
    return GroupSummary(
        num_jobs=len(records) + len(failures),
        num_failed=len(failures),
        ttft_kept=_share(
            [_keeps_ttft(record) for record in records],
            sum(failure.service.ttft_slo_s is not None for failure in failures),
        ),
        tpot_kept=_share(
            [_keeps_tpot(record) for record in records],
            sum(failure.service.tpot_slo_s is not None for failure in failures),
        ),
        goodput_jobs_per_s=good / duration_s if good else 0.0,
        tokens_per_s=tokens / duration_s if tokens else 0.0,
        ttft_s=Distribution.of([record.ttft_s for record in records]) if records else None,
        tpot_s=Distribution.of(tpots_s) if tpots_s else None,
    )


def _duration_s(group: _Group) -> float:
    arrivals_s = [record.arrival_s for record in group.records]
    arrivals_s += [failure.arrival_s for failure in group.failures]
    ends_s = [record.last_token_s for record in group.records]
    return max(ends_s + arrivals_s) - min(arrivals_s)


def _keeps_ttft(record: JobRecord) -> bool | None:
    slo_s = record.service.ttft_slo_s
    return None if slo_s is None else record.ttft_s <= slo_s


def _keeps_tpot(record: JobRecord) -> bool | None:
    slo_s = record.service.tpot_slo_s
    return None if slo_s is None or record.tpot_s is None else record.tpot_s <= slo_s


def _keeps_all(record: JobRecord) -> bool:
    return _keeps_ttft(record) is not False and _keeps_tpot(record) is not False


def _share(kept: Sequence[bool | None], num_failed: int) -> float | None:
    counted = [one for one in kept if one is not None]
    total = len(counted) + num_failed
    return sum(counted) / total if total else None
