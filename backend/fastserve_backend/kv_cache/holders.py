"""The jobs that have KV: how they get it and lose it, and what a round knows about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import takewhile
from typing import Protocol

from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.prefixes import Prefixes
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import Transfer, TransferKind
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.offers import NextRunEstimate


class RunningOrder(Protocol):
    """What the KV cache asks the scheduling policy; ``scheduler.base.Policy`` says more."""

    def next_run_estimate(self, now: float) -> NextRunEstimate: ...

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        """Jobs whose KV was at ``place`` when the round started, in order of ``estimate``."""
        ...

    def on_place_changed(self, job: Job) -> None:
        """The job's ``place`` has changed."""
        ...

    def has_turn(self, job: Job) -> bool: ...


class Holders:
    """Jobs with KV in either tier. The only part of the KV cache that changes ``num_computed``."""

    def __init__(self, tiers: TwoTierKV, prefixes: Prefixes, counters: EngineCounters) -> None:
        self._tiers = tiers
        self._prefixes = prefixes
        self._counters = counters
        self._jobs: dict[int, Job] = {}
        self._moved: dict[int, Job] = {}  # whose ``place`` may be out of date
        self._without_step: set[int] = set()  # holders that have computed nothing yet
        # Where layers have windows, job → its tokens whose steps have ended.
        self._num_finished: dict[int, int] = {}
        self._admitted: dict[int, int] = {}  # strategy defer: job → the most blocks it can need
        self._num_admitted_blocks = 0
        self.numbers = self._jobs.keys()
        """Numbers of all holders. A view, since each round looks up thousands of waiting jobs
        in it."""

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, job_number: int) -> Job | None:
        return self._jobs.get(job_number)

    def with_numbers(self, job_numbers: Iterable[int]) -> list[Job]:
        """The holders among the jobs with these numbers."""
        return [self._jobs[number] for number in job_numbers if number in self._jobs]

    @property
    def num_on_device(self) -> int:
        """Jobs that have computed something and whose KV is not on the host alone."""
        return len(self._jobs) - self._tiers.num_swapped_out - len(self._without_step)

    def admit(self, job: Job) -> bool:
        """Strategy ``defer``: reserve the most blocks that the job can need, if they are free."""
        num_blocks = self._tiers.device.num_blocks
        num_tokens = len(job.prompt_ids) + job.params.max_tokens
        # A step sent ahead takes blocks before the step before it gives any back. A job for which
        # there is no room for that runs without steps ahead.
        needed = min(self._tiers.needs.most(num_tokens, num_steps=2), num_blocks)
        if self._num_admitted_blocks + needed > num_blocks:
            return False
        self._admitted[job.number] = needed
        self._num_admitted_blocks += needed
        return True

    def add(self, job: Job, num_computed: int = 0) -> None:
        """The job has blocks from now on.

        Args:
            num_computed: of so many tokens it has the KV that others have left it. If 0, it has
                blocks for its first step, and knows from ``num_shared`` what it need not compute.
        """
        self._jobs[job.number] = job
        self._moved[job.number] = job
        if num_computed:
            job.num_computed, job.num_shared = num_computed, 0
        else:
            self._without_step.add(job.number)

    def mark_computed(self, job: Job) -> None:
        """A step of the job was sent, so it has computed something."""
        self._without_step.discard(job.number)

    def on_step_finished(self, job_number: int, num_computed: int) -> None:
        """A step has ended, and all steps before it: the job's first ``num_computed`` tokens have
        been run. Only where layers have windows."""
        if job_number in self._jobs:
            self._num_finished[job_number] = num_computed
            self.free_unseen(job_number)

    def free_unseen(self, job_number: int) -> None:
        """The job gives up its blocks behind the windows of its tokens whose steps have not ended.
        Others still find them. If a transfer copies the job's blocks, that is done when it has
        ended."""
        job, num_finished = self._jobs.get(job_number), self._num_finished.get(job_number, 0)
        if job is not None and self.num_unseen(job_number, num_finished):
            self._prefixes.publish(job)
            self._tiers.free_before(job_number, num_finished)

    def num_unseen(self, job_number: int, position: int) -> int:
        """Device blocks of the job that no token from ``position`` on sees, and no transfer
        copies."""
        if self._tiers.transfers.of(job_number) is not None:
            return 0
        return self._tiers.device.num_before(job_number, position)

    def on_moved(self, job: Job) -> None:
        """The job's KV leaves for the host, or has come from there."""
        self._moved[job.number] = job

    def update_places(self, order: RunningOrder) -> None:
        """Set ``place`` of all jobs whose KV has moved. Called when a round starts, so that the
        policy's order stays the same during the round."""
        for number, job in self._moved.items():
            place = Place.DEVICE if number in self._jobs else Place.NOWHERE
            if self._tiers.is_swapped_out(number):
                place = Place.HOST
            if job.place is not place:
                job.place = place
                order.on_place_changed(job)
        self._moved.clear()

    def drop(self, job: Job) -> None:
        """The job gives up its blocks, and computes its KV again."""
        self._prefixes.before_leaving(job)
        self._tiers.release(job.number)
        self.on_lost(job)

    def drop_unsent(self, job: Job) -> None:
        """Drop a job whose first step was not sent, if it has blocks. Nothing is lost but time."""
        if job.number in self._without_step and self._jobs.get(job.number) is job:
            self._tiers.release(job.number)
            self.on_lost(job)

    def on_lost(self, job: Job) -> None:
        """The job's blocks are gone."""
        del self._jobs[job.number]
        self._num_admitted_blocks -= self._admitted.pop(job.number, 0)
        self._num_finished.pop(job.number, None)
        self._moved[job.number] = job
        self._without_step.discard(job.number)
        self._prefixes.on_left(job)
        if job.num_computed:
            job.num_computed = 0
            self._counters.recomputed_jobs += 1

    def remove(self, job: Job) -> None:
        """The job ended, and its KV is somebody else's from now on."""
        self._num_admitted_blocks -= self._admitted.pop(job.number, 0)
        self._jobs.pop(job.number, None)
        self._num_finished.pop(job.number, None)
        self._moved.pop(job.number, None)
        self._without_step.discard(job.number)

    def release(self, job: Job) -> None:
        """The job, which may have no KV, ended."""
        self.remove(job)
        transfer = self._tiers.transfers.of(job.number)
        if transfer is None or transfer.kind is not TransferKind.SWAP_IN:
            self._prefixes.before_leaving(job)
        self._tiers.release(job.number)
        self._prefixes.forget(job)


class RoundState:
    """What is known about the jobs in one round. The parts of a round share and change it.

    Args:
        in_flight: jobs of unfinished steps, which keep what they have.
        going_on: as for ``KVManager.start_round``.
    """

    def __init__(
        self,
        tiers: TwoTierKV,
        holders: Holders,
        order: RunningOrder,
        now: float,
        in_flight: Collection[int],
        going_on: Collection[int] | None,
    ) -> None:
        self.now = now
        self.is_ahead = going_on is not None
        """The running step counts as ended, although it has not."""
        self.running = set(going_on or ())
        """Jobs of the running step that may be offered for the step after it."""
        self.busy = set(in_flight)
        """Jobs in flight, and jobs taken in this round."""
        self.offered: set[int] = set()
        """Jobs that lose no blocks to jobs offered later."""
        self.transfers: list[Transfer] = []
        """Transfers that this round starts, in order."""
        self._tiers = tiers
        self._holders = holders
        self._order = order

    @cached_property
    def next_run_estimate(self) -> NextRunEstimate:
        """The policy's estimate of when a job runs next."""
        return self._order.next_run_estimate(self.now)

    def by_next_run(self, place: Place, *, last_first: bool = False) -> Iterator[Job]:
        """Jobs whose KV was at ``place`` when the round started, those that run next first, or
        those that run last."""
        return self._order.by_next_run(place, self.next_run_estimate, last_first=last_first)

    def less_urgent(self, job: Job, place: Place) -> Iterator[Job]:
        """The jobs at ``place`` of a less urgent priority than ``job``, the last to run first."""
        return takewhile(
            lambda other: other.effective_priority > job.effective_priority,
            self.by_next_run(place, last_first=True),
        )

    @cached_property
    def last_on_device(self) -> Iterator[Job]:
        """Jobs on the device, those that run last first. An iterator: it yields each job once in
        the round."""
        return self.by_next_run(Place.DEVICE, last_first=True)

    @cached_property
    def first_on_device(self) -> Iterator[Job]:
        """The same, but those that run next first."""
        return self.by_next_run(Place.DEVICE)

    def may_leave(self, job: Job) -> bool:
        """Whether the job has device blocks that no step, no transfer and no offered job uses. The
        running step counts as ended if the round is ahead of it."""
        number = job.number
        if number in self.offered:
            return False
        if number in self.running:
            return True
        return (
            number not in self.busy
            and number in self._holders.numbers
            and self._tiers.transfers.of(number) is None
            and self._tiers.device.num_held(number) > 0
        )

    def is_idle(self, job: Job) -> bool:
        """Whether the job may leave now, since it is not in the running step either."""
        return job.number not in self.running and self.may_leave(job)
