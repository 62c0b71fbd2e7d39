"""One tenant's part of the engine's pictures, for viewers that may not see other tenants."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from fastserve_client.engine_state import (
    EngineState,
    LevelState,
    ListedJob,
    PriorityState,
    TierState,
    Totals,
)

_ON_HOST = ("swapping_out", "swapped", "swapping_in")
_NO_TOTALS = Totals(0, 0, 0, 0, 0, 0, 0, 0, 0)


class TenantView:
    """Counts only the tenant's jobs, of those that a picture lists.

    Numbers of jobs tell how many others came in between. So the tenant's jobs get numbers of their
    own, in order of arrival, which they keep while pictures list them.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._numbers: dict[int, int] = {}  # the server's number → the tenant's
        self._next_numbers = itertools.count()

    def part_of(self, state: EngineState) -> dict[str, Any]:
        """The fields of the tenant's picture. ``totals`` is None: they are of all tenants, and so
        is the speed of prefill. Sizes of memory, the policy and its quanta are everybody's."""
        listed = [job for job in state.jobs if job.tenant == self._tenant]
        self._number(listed)
        jobs = tuple(replace(job, number=self._numbers[job.number]) for job in listed)
        running = sum(job.state == "running" for job in jobs)
        levels = Counter(job.level for job in jobs)
        priorities = Counter(job.priority for job in jobs)
        part = EngineState(
            time_s=state.time_s,
            policy=state.policy,
            policy_description=state.policy_description,
            levels=tuple(
                LevelState(level.quantum_s, levels[index])
                for index, level in enumerate(state.levels)
            ),
            jobs=jobs,
            running=running,
            waiting=len(jobs) - running,
            swapped=sum(job.state in _ON_HOST for job in jobs),
            block_size=state.block_size,
            device=TierState(sum(job.device_blocks for job in jobs), state.device.num_blocks),
            host=TierState(sum(job.host_blocks for job in jobs), state.host.num_blocks),
            totals=_NO_TOTALS,
            priorities=tuple(
                PriorityState(priority, number) for priority, number in sorted(priorities.items())
            ),
            waiting_prompt_tokens=sum(job.prompt_tokens for job in jobs if not job.output_tokens),
            num_groups=state.num_groups,
        )
        return asdict(part) | {"totals": None}

    def _number(self, listed: list[ListedJob]) -> None:
        known = self._numbers
        self._numbers = {
            number: known[number] if number in known else next(self._next_numbers)
            for number in sorted(job.number for job in listed)
        }
