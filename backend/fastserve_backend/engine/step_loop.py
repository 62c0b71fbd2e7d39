"""The step loop: which jobs run next, and what becomes of them.

Each cycle is: select jobs → allocate their KV blocks → send the step → deliver the tokens of the
step before, while the ranks compute → receive a result → apply it to the jobs. The engine runs
cycles on a thread of its own with real ranks, the simulator on a virtual clock with modelled ones.
docs/step_loop.md has pictures.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from fastserve_backend.engine.delivery import Delivery, NewToken, OnJobEnd
from fastserve_backend.engine.masks import MaskedJobs, MaskSource
from fastserve_backend.engine.sent_work import FinishedCopy, FinishedStep, SentWork
from fastserve_backend.engine.serving_clock import ServingClock
from fastserve_backend.engine.step_builder import build_step, in_step_order
from fastserve_backend.engine.steps_ahead import EarlyEnd, StepsAhead
from fastserve_backend.engine.unfinished_jobs import UnfinishedJobs
from fastserve_backend.executor.base import Executor
from fastserve_backend.job import Job, JobState
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.round import StepVerdict
from fastserve_backend.kv_cache.transfers import DiskTransfer
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.rank_protocol.messages import NO_TOKEN, Step
from fastserve_backend.scheduler.base import Policy, Scheduled, fill_batch
from fastserve_backend.system.clock import Clock

_NAN_ERROR = (
    "the model computed NaN instead of a token: the checkpoint is damaged, or its values are too "
    "large for dtype; check its files, or serve it with dtype: float32"
)
_log = logging.getLogger(__name__)


class StepLoop:
    """Runs jobs to their ends. It alone changes jobs and, through the KV manager, block tables.

    Used by one thread, except for ``jobs.num_running``.

    Args:
        eos_token_ids: tokens that end a job.
        predict_s: predicts a step's duration in seconds. Not called if no step is sent ahead.
        on_job_end: called once for each job, just before its client learns of its end.
        on_step_finished: called with each finished step and the seconds that it took, without waits
            between pipeline stages. Not called for steps that also computed log-probabilities of
            prompts: predictions do not include that.
        mask_source: computes the masks of jobs with structured output; its answers go to
            ``jobs.on_mask_answer``. None if there are no such jobs.
        rotary_switch: of the model (``ModelConfig``).
        check_integrity: verify the block tables after every cycle, for tests.
    """

    def __init__(
        self,
        policy: Policy,
        kv: KVManager,
        executor: Executor,
        delivery: Delivery,
        clock: Clock,
        *,
        eos_token_ids: Sequence[int],
        counters: EngineCounters,
        predict_s: Callable[[Step], float],
        on_job_end: OnJobEnd,
        on_step_finished: Callable[[Step, float], None],
        mask_source: MaskSource | None = None,
        rotary_switch: int | None = None,
        check_integrity: bool = False,
    ) -> None:
        self.policy = policy
        self._clock = clock
        self._serving_clock = ServingClock(clock)
        self._masked = MaskedJobs(mask_source)
        self._work = SentWork(executor, clock, counters)
        self._ahead = StepsAhead(clock, predict_s, rotary_switch)
        self._rotary_switch = rotary_switch
        self.jobs = UnfinishedJobs(
            policy,
            kv,
            delivery,
            self._masked,
            self._work,
            self._serving_clock,
            counters,
            eos_token_ids,
            on_job_end,
            rotary_switch,
        )
        self._counters = counters
        self._on_step_finished = on_step_finished
        self._check_integrity = check_integrity
        self._step_ids = itertools.count()
        self._num_decodes = 0  # in the latest step
        self._ran: list[Job] = []  # jobs whose step has ended since the latest step was sent

    @property
    def kv(self) -> KVManager:
        """The one for the ranks as they are now."""
        return self.jobs.kv

    @property
    def is_idle(self) -> bool:
        """Whether a cycle would do nothing: every job waits for a mask, no result is due, and no KV
        is to be copied."""
        return self._work.is_empty and self.jobs.are_idle and not self.kv.wants_round

    @property
    def mask_wait_s(self) -> float:
        """Seconds to wait for ``jobs.on_mask_answer`` before the next cycle."""
        return self._masked.worth_waiting_s(self._clock.now())

    def run_cycle(self) -> None:
        """Send a step if the ranks can take one, deliver tokens, wait for the next result.

        Raises:
            EngineError: a rank died or stopped answering.
        """
        if self._work.executor.can_submit:
            self._run_next()
        elif self._ahead_in_s() == 0:
            self._run_next(behind=self._end_early())
        self.jobs.deliver_tokens()
        result = self._work.receive(self._ahead_in_s(), jobs_wait=len(self.jobs) > 0)
        if isinstance(result, FinishedStep):
            self._apply_step(result)
        elif isinstance(result, FinishedCopy):
            self._apply_copy(result)
        if self._check_integrity:
            self.kv.tiers.check_integrity()

    def suspend(self, kv: KVManager) -> None:
        """The ranks are lost: all KV is gone, and no unfinished step will finish.

        Until ``resume``, jobs may be added and cancelled, but ``run_cycle`` must not be called.

        Args:
            kv: an empty one.
        """
        self._serving_clock.stop()
        self.jobs.on_ranks_lost(kv)
        self._work.forget()
        self._ahead.forget()
        self._ran.clear()
        self.jobs.deliver_tokens()

    def resume(self, executor: Executor, kv: KVManager) -> None:
        """Go on with fresh ranks. Jobs that do not fit in their KV cache end with ERROR.

        Args:
            kv: an empty one, of the size of that cache.
        """
        self._serving_clock.restart()
        self._work.executor = executor
        self.jobs.on_ranks_replaced(kv)

    # --- The next step ------------------------------------------------------------------------

    def _run_next(self, behind: EarlyEnd | None = None) -> None:
        """Choose the next step and send it, if a job can run.

        Args:
            behind: the running step, if there is one; it counts as ended.
        """
        now = self._clock.now()
        batch = self._allocate(self._serving_clock.at(now), behind)
        if batch is None or (behind is not None and not batch):
            return
        self._update_states(batch, behind, now)
        if batch:
            self._send(batch, behind)
        self.jobs.num_running = self._work.num_jobs if behind is None else len(batch)

    def _allocate(self, now: float, behind: EarlyEnd | None) -> list[Scheduled] | None:
        """Select jobs and allocate their KV blocks; send the copies that other jobs wait for.

        None: no job may run before copies, or the running step, have ended.
        """
        if not self.jobs and not self.kv.wants_round:
            return []
        if self.kv.holds_steps:
            return None
        in_flight = self._work.job_numbers
        going_on = None if behind is None else behind.numbers_going_on
        kv_round = self.kv.start_round(now, in_flight, going_on)
        if going_on is not None:
            in_flight -= going_on
        # Passed over like jobs of unfinished steps.
        in_flight |= self._masked.waiting | self.kv.not_ready
        jobs = self.policy.walk(now, in_flight)
        limits = self.policy.limits_for(now, self.jobs.num_without_token, self._num_decodes)
        batch = fill_batch(jobs, limits, in_flight, kv_round)
        result = kv_round.commit()
        self._work.send_copies(result.transfers, self.kv.tiers.device.block_size)
        self._work.send_disk_copies(result.disk_transfers)
        if result.verdict is not StepVerdict.SEND:
            return None
        return batch

    def _update_states(
        self, batch: Sequence[Scheduled], behind: EarlyEnd | None, now: float
    ) -> None:
        """Jobs of the batch run from now on. Jobs that ran until now and are not in it do not."""
        for job, _ in batch:
            job.state = JobState.RUNNING
            if job.first_scheduled_s is None:
                job.first_scheduled_s = now
                job.num_cached_tokens = job.num_ready
            elif job.trace is not None:
                job.trace.on_running(now)
        chosen = {job.number for job, _ in batch}
        set_aside = [
            job for job in self._ran if job.state is JobState.RUNNING and job.number not in chosen
        ]
        self._ran.clear()
        for job in set_aside:
            job.state = JobState.PREEMPTED
        if behind is None:
            self._count_preemptions(set_aside, now)
        else:
            behind.set_aside = set_aside

    def _send(self, batch: Sequence[Scheduled], behind: EarlyEnd | None) -> None:
        batch = in_step_order(batch)
        rows = None if behind is None else behind.rows
        device = self.kv.tiers.device
        step = build_step(next(self._step_ids), batch, device, rows, self._rotary_switch)
        for job, num_tokens in batch:
            job.on_sent(num_tokens)
        self.kv.on_sent()
        self.policy.on_batch_sent(batch)
        self._num_decodes = step.num_decodes
        self._work.send_step(batch, step, is_behind=behind is not None)

    # --- The running step counts as ended -----------------------------------------------------

    def _ahead_in_s(self) -> float | None:
        """Seconds until the running step counts as ended. None: not before it has ended."""
        if not self._work.executor.can_submit_ahead or self.kv.holds_steps:
            return None
        return self._ahead.due_in_s(self._work.steps[0])

    def _end_early(self) -> EarlyEnd:
        """The running step counts as ended from now on."""
        early_end = self._ahead.end_early(self._work.steps[0])
        self._on_ran(early_end.going_on, self._clock.now())
        return early_end

    def _on_ran(self, going_on: Sequence[Scheduled], ended_s: float) -> None:
        """A step has ended, or counts as ended; these of its jobs go on."""
        self._ran += [job for job, _ in going_on]
        self.policy.on_iteration_finished(going_on, self._serving_clock.at(ended_s))

    # --- Results ------------------------------------------------------------------------------

    def _apply_copy(self, finished: FinishedCopy) -> None:
        transfer, error, seconds = finished.transfer, finished.result.error, finished.result.seconds
        if error is not None:
            _log.warning("copying KV blocks failed: %s", error)
        succeeded = error is None
        if isinstance(transfer, DiskTransfer):
            self.kv.on_disk_transfer_finished(transfer, succeeded=succeeded, seconds=seconds)
            return
        job = self.jobs.get(transfer.job_number)
        if job is not None and job.trace is not None:
            num_blocks = len(transfer.device_blocks)
            job.trace.add(transfer.kind.value, finished.sent_s, self._clock.now(), num_blocks)
        self.kv.on_transfer_finished(transfer.job_number, succeeded=succeeded, seconds=seconds)

    def _apply_step(self, finished: FinishedStep) -> None:
        sent = finished.sent
        self.kv.on_step_finished(sent.computed())
        for job in sent.jobs.values():
            if job.state is JobState.FINISHED and not self._work.uses(job):
                self.jobs.release(job)  # it ended while the step ran
        self._apply_tokens(finished)
        early_end = self._ahead.on_step_finished(sent)
        if early_end is None:
            going_on = [one for one in sent.batch if one.job.state is not JobState.FINISHED]
            self._on_ran(going_on, finished.ended_s)
        else:
            self._count_preemptions(early_end.set_aside, finished.ended_s)
        if not sent.step.prompt_rows:
            self._on_step_finished(sent.step, finished.elapsed_s)

    def _apply_tokens(self, finished: FinishedStep) -> None:
        """Give the step's tokens to its jobs. Jobs that ended while it ran get none."""
        sent = finished.sent
        for job in sent.jobs.values():
            job.executed_s += finished.elapsed_s
        for rows, scores in zip(sent.step.prompt_rows, finished.result.prompt_scores, strict=True):
            prompt_logprobs = sent.batch[rows.job].job.prompt_logprobs
            assert prompt_logprobs is not None
            prompt_logprobs.on_scores(scores)
        sampling = itertools.islice(sent.jobs.values(), sent.num_sampling)
        for job, token in zip(sampling, NewToken.from_result(finished.result), strict=True):
            if job.state is JobState.FINISHED:
                continue
            if token.token_id == NO_TOKEN:
                self.jobs.fail(job, _NAN_ERROR)
            else:
                self.jobs.on_token(job, token, finished.ended_s)
        self._masked.request_masks(finished.ended_s)

    def _count_preemptions(self, set_aside: Iterable[Job], now: float) -> None:
        for job in set_aside:
            if job.state is not JobState.FINISHED:  # as its pending token may have shown
                job.num_preemptions += 1
                self._counters.preemptions += 1
                if job.trace is not None:
                    job.trace.on_preempted(now)
