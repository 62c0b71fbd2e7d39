"""A KV manager that tests offer jobs to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.round import Round
from fastserve_backend.kv_cache.session_history import SessionHistory
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import DiskTransfer, Transfer
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.offers import OfferOutcome
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, LayerKind
from fastserve_backend.rank_protocol.link import Link
from jobs import make_job, run_iteration
from policies import TIMES, LinearTimes

FAST_LINK = Link(1e-6, 1e-6)
SLOW_LINK = Link(1000.0, 1000.0)
LOOK_AHEAD_ROUNDS = 8


class Desk:
    """A manager whose jobs run in order of their numbers: 0 is the most urgent."""

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int = 100,
        *,
        strategy: str = "proactive",
        link: Link = FAST_LINK,
        incremental: bool = True,
        write_back: bool = False,
        times: LinearTimes = TIMES,
        kinds: Sequence[LayerKind] = ONE_GROUP,
        num_slots: int = 0,
        disk: Link = FAST_LINK,
        **kv_cache: object,
    ) -> None:
        config = KVCacheSection.model_validate(
            {
                "strategy": strategy,
                "incremental": incremental,
                "write_back": write_back,
                "prefix_caching": False,
            }
            | kv_cache
        )
        self.counters = EngineCounters(LatencyHistograms(slo_s=0.3))
        self.tiers = TwoTierKV(
            num_blocks,
            num_host_blocks,
            16,
            incremental=incremental,
            kinds=kinds,
            num_disk_blocks=num_slots,
        )
        costs = SwapCosts(times, 100, link, disk)
        self.history = SessionHistory(config.session_ttl_s, times, inherits_age=False)
        self.manager = KVManager(
            self.tiers, self, config, costs, self.counters, history=self.history
        )
        self.now = 0.0
        self.known: dict[int, Job] = {}
        self.starving: set[int] = set()
        self.disk_begun: list[DiskTransfer] = []  # and not ended
        self.start_round()

    def has_turn(self, job: Job) -> bool:
        return job.number in self.starving

    def on_place_changed(self, job: Job) -> None:
        pass

    def by_next_run(self, place: Place, estimate: object, *, last_first: bool) -> Iterator[Job]:
        numbers = sorted(self.known, reverse=last_first)
        return (self.known[n] for n in numbers if self.known[n].place is place)

    def next_run_estimate(self, now: float):  # type: ignore[no-untyped-def]
        return lambda job: (job.number, 0.0)

    def offer(
        self,
        *jobs: Job,
        in_flight: Sequence[Job] = (),
        going_on: Sequence[Job] | None = None,
        tokens: int | None = None,
    ) -> list[Job]:
        """Runs a round that offers the jobs in this order; returns the jobs that were taken."""
        self.now += 1.0
        numbers = None if going_on is None else {job.number for job in going_on}
        self.start_round({job.number for job in in_flight}, numbers)
        taken = []
        for job in jobs:
            self.known[job.number] = job
            self.round.find_prefix(job)
            self.answer = self.round.offer(job, tokens or job.num_uncomputed)
            if self.answer.outcome is OfferOutcome.TAKEN:
                taken.append(job)
        result = self.round.commit()
        self.begun, self.verdict = result.transfers, result.verdict
        self.disk_begun += result.disk_transfers
        self.tiers.check_integrity()
        return taken

    def start_round(
        self, in_flight: Collection[int] = (), going_on: Collection[int] | None = None
    ) -> Round:
        """Starts the round to which jobs are offered from now on."""
        self.round = self.manager.start_round(self.now, in_flight, going_on)
        return self.round

    def offer_until_copies_begin(self, *jobs: Job) -> None:
        """Repeats the round until a copy begins; nothing else changes meanwhile."""
        for _ in range(LOOK_AHEAD_ROUNDS):
            self.offer(*jobs)
            if self.begun:
                return

    def run(self, *jobs: Job) -> None:
        """Runs an iteration of exactly these jobs."""
        assert self.offer(*jobs) == list(jobs)
        self.send(*jobs)
        self.manager.on_step_finished()

    def run_first(self, *jobs: Job) -> None:
        """Runs an iteration of the first of these jobs, for which the others wait."""
        assert self.offer(*jobs) == [jobs[0]]
        self.send(jobs[0])
        self.manager.on_step_finished()

    def send(self, *jobs: Job, tokens: int | None = None) -> None:
        """Sends the step of the jobs that the last round took, with ``tokens`` or all that they
        have left."""
        for job in jobs:
            run_iteration(job, tokens)
        self.manager.on_sent()

    def end_step(self, *jobs: Job) -> None:
        """The last step that was sent ends; all tokens that these jobs have computed are in it or
        before it."""
        computed = [(job.number, job.num_computed) for job in jobs]
        self.manager.on_step_finished(computed)

    def end_copies(self, *, succeeded: bool = True) -> list[Transfer]:
        ended = list(self.tiers.transfers)
        for transfer in ended:
            self.manager.on_transfer_finished(
                transfer.job_number, succeeded=succeeded, seconds=1e-6
            )
        self.tiers.check_integrity()
        return ended

    def end_disk_copies(self, *, succeeded: bool = True) -> list[tuple[int, str]]:
        """The jobs whose copies to or from the disk ended."""
        ended, self.disk_begun = self.disk_begun, []
        for transfer in ended:
            self.manager.on_disk_transfer_finished(transfer, succeeded=succeeded, seconds=1e-6)
            self.tiers.check_integrity()
        return [(one.job_number, "write" if one.is_write else "read") for one in ended]

    def held(self, *jobs: Job) -> list[int]:
        return [self.tiers.device.num_held(job.number) for job in jobs]

    def kinds(self) -> list[tuple[int, str]]:
        return [(transfer.job_number, transfer.kind.value) for transfer in self.begun]


def jobs_of(*sizes: int, max_tokens: int = 1000) -> list[Job]:
    return [make_job(n, size, max_tokens=max_tokens) for n, size in enumerate(sizes)]
