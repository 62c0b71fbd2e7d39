"""Who has KV blocks on the device, who waits on the host, and who computes again.

One round for each choice of a step: ``start_round``; the policy's jobs are offered to the
``Round``; ``Round.commit`` says what to send. Only decisions are made here: the ranks copy.

Strategies (FastServe §4.2, Fig. 15):

* ``defer``: a new job is admitted only if its longest possible KV is free. Nobody loses any KV.
* ``recompute``: when blocks are short, the jobs that run last lose their KV and compute it again
  later.
* ``reactive``: these jobs are swapped to the host instead. They return when they are to run. Steps
  wait for the transfers.
* ``proactive``: as ``reactive``, but other jobs run during the transfers, unless waiting for them
  costs less. And transfers start before they are needed, see ``LookAhead``. A new job does not
  start if others would have to compute again for it, unless it starves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import Job
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.device_room import RoomParts
from fastserve_backend.kv_cache.holders import Holders, RunningOrder
from fastserve_backend.kv_cache.look_ahead import LookAhead
from fastserve_backend.kv_cache.prefix_keys import PrefixKeys
from fastserve_backend.kv_cache.prefixes import Prefixes
from fastserve_backend.kv_cache.round import Round
from fastserve_backend.kv_cache.session_history import SessionHistory
from fastserve_backend.kv_cache.sessions import HeldSessions
from fastserve_backend.kv_cache.swapping import Swapping
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.kv_cache.transfers import DiskTransfer
from fastserve_backend.metrics.counters import EngineCounters


class KVManager:
    """Owns ``tiers``. Changes ``num_computed``, ``num_shared``, ``place`` and the swap counts of
    jobs.

    Args:
        rotary_switch: of the model (``ModelConfig``).
        history: of sessions. Default: no KV is held for them.
    """

    def __init__(
        self,
        tiers: TwoTierKV,
        order: RunningOrder,
        config: KVCacheSection,
        costs: SwapCosts,
        counters: EngineCounters,
        *,
        rotary_switch: int | None = None,
        history: SessionHistory | None = None,
    ) -> None:
        self.tiers = tiers
        self._counters = counters
        self._costs = costs
        keys = PrefixKeys(config, tiers.device.block_size, rotary_switch)
        self._prefixes = Prefixes(tiers.device, keys, costs)
        self._restarting: dict[int, Job] = {}
        self._holders = Holders(tiers, self._prefixes, counters)
        self._sessions = HeldSessions(
            tiers, self._holders, self._prefixes, config, costs, history, counters, rotary_switch
        )
        self._swapping = Swapping(
            tiers, self._holders, self._prefixes, config, costs, counters, self._sessions
        )
        self._look_ahead = LookAhead(
            tiers, self._holders, self._prefixes, self._swapping, config, costs
        )
        self._parts = RoomParts(
            config.strategy,
            tiers,
            self._prefixes,
            self._holders,
            self._swapping,
            self._sessions,
            order,
            counters,
        )
        self._round = self._new_round(0.0, (), None, holds_steps=False)  # gets no offers

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be sent until all transfers have ended."""
        return self._round.holds_steps and len(self.tiers.transfers) > 0

    @property
    def not_ready(self) -> Set[int]:
        """Numbers of jobs that must not run yet: before they have lost their KV (``restart``), or
        got what their sessions hold."""
        return self._restarting.keys() | self._sessions.arriving

    @property
    def num_sessions_held(self) -> int:
        """Sessions whose KV is held."""
        return len(self._sessions)

    @property
    def wants_round(self) -> bool:
        """Whether a round has something to do without any job: held KV is to be copied or
        written."""
        return self._sessions.has_to_copy or self._sessions.has_to_write

    @property
    def num_away(self) -> int:
        """Jobs whose KV is only on the host, or in a swap in either direction."""
        return sum(not self.tiers.may_run(job.number) for job in list(self._holders))

    def start_round(
        self, now: float, in_flight: Collection[int], going_on: Collection[int] | None = None
    ) -> Round:
        """A new round; the last one takes no more offers.

        Args:
            in_flight: jobs of unfinished steps, which keep what they have.
            going_on: given while a step runs, if the round is for the step after it: the jobs of
                ``in_flight`` that may run in that step too. The others end with theirs.
        """
        last = self._round
        for job in last.stalled:
            job.swap_stall_s += now - last.now
        for job in last.taken:
            if self._prefixes.is_on:
                self._holders.drop_unsent(job)  # it may begin with another prefix next time
        for job in list(self._restarting.values()):
            self._try_restart(job)
        self._sessions.start_round(now)
        self._holders.update_places(self._parts.order)
        self._round = self._new_round(now, in_flight, going_on, holds_steps=last.holds_steps)
        return self._round

    def on_arrival(self, job: Job, now: float) -> None:
        """A new job, which the policy does not know yet. Sets ``job.num_shared``, or gives the job
        the KV that its session holds."""
        self._look_ahead.on_arrival(job, now)
        self._sessions.on_arrival(job, now)
        if job.num_computed == 0:
            self._prefixes.find(job)

    def on_sent(self) -> None:
        """The step of the latest round was sent. Its jobs count the tokens that it computes."""
        for job in self._round.taken:
            self._holders.mark_computed(job)
        self._counters.prefix_cached_tokens += self._round.prefixes.num_cached_tokens
        self._round.prefixes.publish_all()

    def on_step_finished(self, computed: Iterable[tuple[int, int]] = ()) -> None:
        """A step has ended.

        Args:
            computed: for each of its jobs the number, and how many of the job's first tokens have
                been run.
        """
        if self.tiers.has_windows:
            for number, num_computed in computed:
                self._holders.on_step_finished(number, num_computed)

    def on_transfer_finished(self, job_number: int, *, succeeded: bool, seconds: float) -> None:
        """The ranks have ended the job's transfer. It took the link ``seconds``."""
        self._look_ahead.on_change()
        self._swapping.on_transfer_finished(job_number, succeeded=succeeded, seconds=seconds)
        if self.tiers.has_windows:
            self._holders.free_unseen(job_number)

    def on_disk_transfer_finished(
        self, transfer: DiskTransfer, *, succeeded: bool, seconds: float
    ) -> None:
        """The ranks have ended the transfer. It took the disk ``seconds``."""
        self._sessions.on_disk_transfer_finished(transfer, succeeded=succeeded, seconds=seconds)

    def restart(self, job: Job) -> None:
        """The job, which no step runs, has to compute its KV again: it has become longer than
        ``rotary_switch``. Its blocks are freed as soon as nothing copies them."""
        self._restarting[job.number] = job

    def release(self, job: Job, now: float) -> None:
        """The job ended and no step uses its blocks. They are free, or held for its session."""
        self._restarting.pop(job.number, None)
        self._look_ahead.on_change()
        if not self._sessions.on_end(job, now):
            self._holders.release(job)

    def _try_restart(self, job: Job) -> None:
        if self.tiers.transfers.of(job.number) is not None:
            return
        del self._restarting[job.number]
        if self._holders.get(job.number) is not None:
            self._holders.drop(job)
        self._prefixes.forget(job)
        self._look_ahead.on_change()

    def _new_round(
        self,
        now: float,
        in_flight: Collection[int],
        going_on: Collection[int] | None,
        *,
        holds_steps: bool,
    ) -> Round:
        return Round(
            self._parts,
            self._look_ahead,
            self._costs,
            now,
            in_flight,
            going_on,
            holds_steps=holds_steps,
        )
