"""The engine: starts the ranks, admits jobs, and runs the step loop on a thread of its own.

Everything else talks to the loop through an inbox of arrivals and cancellations, which the thread
takes between two turns.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import random
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from fastserve_backend.checkpoints.configured_model import load_model_and_tokenizer
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.tokenizer import Tokenizer
from fastserve_backend.config import START_TIMEOUT_S, EngineConfig
from fastserve_backend.engine.delivery import Delivery
from fastserve_backend.engine.picture import take_picture
from fastserve_backend.engine.request_checks import RequestChecks
from fastserve_backend.engine.step_loop import StepLoop
from fastserve_backend.engine.supervision import RankStart
from fastserve_backend.engine.watches import StateSink, Watches
from fastserve_backend.errors import (
    DrainingError,
    EngineError,
    FastServeError,
    OverloadedError,
)
from fastserve_backend.executor.base import OwnedExecutor
from fastserve_backend.executor.cluster import Cluster
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.grammars.client import GrammarClient
from fastserve_backend.grammars.messages import FromGrammars, Vocabulary
from fastserve_backend.job import FinishReason, Job, OutputSink
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.length_prediction.job_predictions import JobPredictions
from fastserve_backend.length_prediction.messages import Predicted
from fastserve_backend.length_prediction.settings import PredictorSettings
from fastserve_backend.metrics.counters import EngineCounters, EngineSnapshot
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.profile.correction import CorrectedLatency
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.measure import (
    ReadyRanks,
    cache_path_if_any,
    link_of,
    load_or_measure,
)
from fastserve_backend.rank_protocol.messages import Ready, Setup, Step
from fastserve_backend.sampling_params import MAX_SEED, SamplingParams
from fastserve_backend.scheduler.base import Policy
from fastserve_backend.scheduler.registry import make_policy
from fastserve_backend.system.clock import Clock, MonotonicClock
from fastserve_backend.system.restart_limit import RestartLimiter

# How often an idle engine looks whether its ranks are alive.
IDLE_CHECK_S = 0.5
# How long close() waits for the loop to end: one iteration, and the ranks' own time to stop.
CLOSE_TIMEOUT_S = 60.0
# Beside other work a small model's iterations drift several times a second.
_DRIFT_LOG_INTERVAL_S = 60.0
_log = logging.getLogger(__name__)


class _Stop:
    """Inbox item: end the loop."""


class _Wake:
    """Inbox item: something else than the inbox has news."""


# An arrival, the number of a job to cancel, or one of those above.
_InboxItem = Job | int | Predicted | FromGrammars | _Stop | _Wake


class Engine:
    """Serves jobs on a set of ranks, and on fresh ones when one of them dies or hangs. ``start``
    before anything else; ``close`` at the end."""

    tokenizer: Tokenizer
    model_config: ModelConfig
    profile: CorrectedLatency
    checks: RequestChecks

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        make_executor: Callable[[], OwnedExecutor] | None = None,
        check_integrity: bool = False,
    ) -> None:
        """
        Args:
            make_executor: makes the ranks, at the start and whenever they have to be restarted;
                default: real ones, as the configuration says.
            check_integrity: verify the block tables after every step, for tests.
        """
        self.config = config
        self.clock = clock or MonotonicClock()
        self.counters = EngineCounters(LatencyHistograms(config.scheduler.slo_ms / 1e3))
        self.failure: str | None = None
        """Why the engine is broken: all jobs have failed and new ones raise EngineError."""
        self.gave_up = False
        """Whether ``failure`` is that the ranks were restarted too often."""
        self.predictions: JobPredictions | None = None
        """Of output lengths, where the configuration wants them."""
        self._make_executor = make_executor or self._make_distributed
        self._cluster: Cluster | None = None
        self._start_timeout_s = 0.0
        self._profiled: LatencyProfile | None = None  # by whoever starts ranks
        self._check_integrity = check_integrity
        self._limiter = RestartLimiter()
        self._watches = Watches()
        self._next_drift_log_s = -math.inf
        self._inbox: queue.SimpleQueue[_InboxItem] = queue.SimpleQueue()
        self._grammars = GrammarClient(self._vocabulary, self._inbox.put)
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._admission = threading.Condition()  # guards the next two
        self._num_unfinished = 0
        self._draining = False
        # Since the start the engine's thread alone uses these.
        self._executor: OwnedExecutor
        self._ready: Ready
        self._loop: StepLoop

    # --- Life ---------------------------------------------------------------------------------

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Load tokenizer and model, start the ranks, measure the latency profile.

        Raises:
            ConfigError, ModelError: the configuration or the model cannot be used.
            EngineError: a rank died or was not ready within ``timeout_s``.
        """
        self._start_timeout_s = timeout_s
        predictor = PredictorSettings.of(self.config)
        self._cluster = Cluster.of(self.config.parallel)
        with ExitStack() as undo:
            undo.callback(self._close_predictions)
            undo.callback(self._close_cluster)
            self.model_config, self.tokenizer = load_model_and_tokenizer(self.config)
            if predictor is not None:  # first, since it loads beside the ranks
                self.predictions = JobPredictions(predictor, self.tokenizer.decode, self._inbox.put)
            self._executor = self._make_executor()
            undo.callback(self._executor.close)
            self._ready, profile = self._start_ranks(self._executor)
            self.profile = CorrectedLatency(profile)
            self._loop = self._make_loop()
            undo.pop_all()
        self.checks = RequestChecks(
            self.model_config, self.tokenizer, lambda: self._loop.kv.tiers.device.capacity
        )
        _log.info(
            "ready: %s, %s, %s",
            self.config.model.model,
            self._describe_ranks(),
            self._loop.policy.describe(),
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new jobs and wait until none is left; False if some are after ``timeout_s``."""
        self._watches.close()
        with self._admission:
            self._draining = True
            return self._admission.wait_for(lambda: self._num_unfinished == 0, timeout_s)

    def close(self) -> None:
        """Cancel what is left and stop the ranks; idempotent, and each call returns when that is
        done. Not for sinks: the thread that calls them would wait for itself."""
        with self._admission:
            self._draining = True
        if self._thread is not None:
            self._inbox.put(_Stop())
            self._thread.join(CLOSE_TIMEOUT_S)
        self._close_predictions()

    # --- Jobs ---------------------------------------------------------------------------------

    def submit(
        self,
        job_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: OutputSink,
        *,
        prompt_text: str | None = None,
    ) -> int:
        """Accept a job and return its number; ``sink`` then gets its outputs and one end.

        Args:
            prompt_text: what the user wrote, from which the length of the answer is predicted
                where that is wanted; default: the text of ``prompt_ids``.

        Raises:
            InvalidRequestError: the prompt is empty, has unknown tokens, or the job is too long.
            OverloadedError, DrainingError: not now.
            EngineError: the engine is broken.
        """
        self.checks.validate(prompt_ids, params)
        job = Job(
            id=job_id,
            number=next(self._numbers),
            prompt_ids=array("i", prompt_ids),
            params=params,
            arrival_s=self.clock.now(),
            sink=sink,
            seed=random.randint(0, MAX_SEED) if params.seed is None else params.seed,
        )
        self._admit(job, prompt_text)
        return job.number

    def cancel(self, number: int) -> None:
        """End the job with CANCELLED after the running iteration; unknown numbers are ignored."""
        self._inbox.put(number)

    def watch(self, interval_s: float, sink: StateSink) -> int:
        """Show ``sink`` the engine every ``interval_s``, beginning now; returns a number for
        ``unwatch``. Costs the engine's thread a picture each time, and no job anything else.

        Raises:
            OverloadedError, DrainingError: not now.
            EngineError: the engine is broken.
        """
        if self.failure is not None and not self._draining:
            raise EngineError(self.failure)
        number = self._watches.add(interval_s, sink)
        self._inbox.put(_Wake())
        return number

    def unwatch(self, number: int) -> None:
        """No further pictures, and no end either; unknown numbers are ignored."""
        self._watches.remove(number)

    def snapshot(self) -> EngineSnapshot:
        """For metrics and tests, from any thread."""
        return self._loop.snapshot(self._num_unfinished)

    def _admit(self, job: Job, prompt_text: str | None) -> None:
        limit = self.config.scheduler.max_queued_requests
        predictions = self.predictions
        if predictions is not None:
            prompt_text = predictions.text_of(job.prompt_ids, prompt_text)
        with self._admission:
            if self._draining:  # also when the engine was closed then, which ends it as a failure
                raise DrainingError("the server is shutting down and takes no new requests")
            if self.failure is not None:
                raise EngineError(self.failure)
            if self._num_unfinished >= limit:
                raise OverloadedError(f"{limit} requests are queued already; try again later")
            self._num_unfinished += 1
            self._inbox.put(job)
            # The answer comes after the job, and the job's end, which waits for this lock, after
            # the question.
            if predictions is not None and prompt_text is not None:
                predictions.ask(job, prompt_text)

    # --- The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine was closed"
        try:
            self._serve()
            self._loop.cancel_all()
        except EngineError as error:
            reason = str(error)
            self.gave_up = True
            _log.error("%s; all jobs fail", reason)
            self._executor.kill()
        except Exception:
            reason = "internal error in the engine; see the server's log"
            _log.exception("the engine's loop failed; all jobs fail")
        finally:
            self._fail(reason)
            self._executor.close()
            self._close_cluster()
            self._grammars.close()

    def _serve(self) -> None:
        """Returns when the engine is closed.

        Raises:
            EngineError: ranks died or hung more often than they are restarted.
        """
        while self._take_inbox(wait=self._loop.is_idle):
            try:
                self._loop.turn()
            except EngineError as error:
                self._loop.suspend(self._new_kv(self._loop.policy))
                if not self._restart(error):
                    return

    def _restart(self, error: FastServeError) -> bool:
        """Go on with fresh ranks, after ``error`` of the old ones. Jobs come and are cancelled
        meanwhile. False: the engine was closed before there were any.

        Raises:
            EngineError: there were too many restarts.
        """
        while True:
            number = self._limiter.restart(self.clock.now())
            if number is None:
                raise EngineError(
                    f"the model's processes failed: {error}; given up after "
                    f"{self._limiter.describe()}"
                )
            _log.error(
                "%s; restarting the ranks (%d of at most %s); %d unfinished jobs go on after it",
                error,
                number,
                self._limiter.describe(),
                self._num_unfinished,
            )
            self.counters.worker_restarts += 1
            began_s = self.clock.now()
            start = RankStart(self._executor, self._make_executor, self._start_ranks)
            start.fresh.add_done_callback(lambda _: self._inbox.put(_Wake()))
            while not start.fresh.done():
                if not self._take_inbox(wait=True):
                    start.abandon()
                    return False
            try:
                self._executor, self._ready, profile = start.fresh.result()
            except FastServeError as failed:
                error = failed
                continue
            finally:
                self._limiter.leave_out(self.clock.now() - began_s)
            if profile is not self.profile.model:
                self.profile.replace(profile)
                self._loop.policy.recalibrate()
            self._loop.resume(self._executor, self._new_kv(self._loop.policy))
            _log.info(
                "the ranks are back after %.1f s: %s",
                self.clock.now() - began_s,
                self._describe_ranks(),
            )
            return True

    def _take_inbox(self, *, wait: bool) -> bool:
        """Arrivals, cancellations and answers; with ``wait``, waits for one a while. False to
        stop."""
        self._show_watchers()
        timeout_s = min(IDLE_CHECK_S, self._watches.due_in_s(self.clock.now()))
        while True:
            wait_s = timeout_s if wait else self._loop.mask_wait_s
            try:
                item = self._inbox.get(block=wait_s > 0, timeout=wait_s)
            except queue.Empty:
                return True
            wait = False
            if isinstance(item, _Stop):
                return False
            if isinstance(item, Job):
                self._loop.add(item)
            elif isinstance(item, int):
                self._loop.cancel(item)
            elif isinstance(item, Predicted):
                self._take_prediction(item)
            elif not isinstance(item, _Wake):
                self._loop.masked(item)

    def _take_prediction(self, answer: Predicted) -> None:
        assert self.predictions is not None
        if answer.num_tokens is None or self._loop.predicted(answer.number, answer.num_tokens):
            self.predictions.answered(answer, self.clock.now())

    def _show_watchers(self) -> None:
        now = self.clock.now()
        if self._watches.due_in_s(now) > 0:
            return
        policy = self.config.scheduler.policy
        self._watches.show(now, take_picture(now, policy, self._loop, self.counters))

    def _fail(self, reason: str) -> None:
        """Refuse new jobs from now on and end all that are left with ERROR."""
        with self._admission:
            self.failure = reason
        self._watches.close()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Job):  # admitted before the failure was visible
                self._loop.add(item)
        self._loop.fail_all(reason)

    def _count_end(self, job: Job, reason: FinishReason) -> None:
        if job.refusal is None:
            self.counters.finished[reason.value] += 1
        else:
            self.counters.refused += 1
        with self._admission:
            self._num_unfinished -= 1
            self._admission.notify_all()
        if self.predictions is not None:
            self.predictions.ended(job)

    # --- Start --------------------------------------------------------------------------------

    def _vocabulary(self) -> Vocabulary:
        tokens = [self.tokenizer.token_bytes(one) for one in range(self.model_config.vocab_size)]
        return Vocabulary(tokens, self.model_config.eos_token_ids)

    def _make_distributed(self) -> OwnedExecutor:
        return DistributedExecutor(self._cluster)

    def _close_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.close()

    def _close_predictions(self) -> None:
        if self.predictions is not None:
            self.predictions.close()

    def _start_ranks(self, executor: OwnedExecutor) -> tuple[Ready, LatencyProfile]:
        """Returns when they have loaded the model, with the latency profile of such ranks."""
        model = self.model_config
        setup = Setup.of(self.config, model.directory, model.eos_token_ids)
        ready = executor.start(setup, self._start_timeout_s)
        ranks = ReadyRanks.of(model, self.config, ready, executor, self.clock.now)
        if self._profiled is None or self._profiled.identity.key != ranks.identity.key:
            self._profiled = load_or_measure(cache_path_if_any(ranks.identity), ranks)
        return ready, self._profiled

    def _make_loop(self) -> StepLoop:
        policy = make_policy(
            self.config.scheduler,
            self.profile,
            max_model_len=self.model_config.max_model_len,
            kv_tokens=self._ready.num_blocks * self.config.kv_cache.block_size,
        )
        return StepLoop(
            policy,
            self._new_kv(policy),
            self._executor,
            Delivery(self.tokenizer),
            self.clock,
            eos_token_ids=self.model_config.eos_token_ids,
            counters=self.counters,
            predict_s=lambda step: self.profile.iteration_s(IterationLoad.of_step(step)),
            on_end=self._count_end,
            on_iteration=self._observe,
            masks=self._grammars,
            check_integrity=self._check_integrity,
        )

    def _new_kv(self, policy: Policy) -> KVManager:
        """For the ranks as they last were: no job has KV on them."""
        ready, config = self._ready, self.config.kv_cache
        tiers = TwoTierKV(
            ready.num_blocks,
            ready.num_host_blocks,
            config.block_size,
            incremental=config.incremental,
        )
        costs = SwapCosts(self.profile, ready.block_bytes, link_of(ready))
        return KVManager(tiers, policy, config, costs, self.counters)

    def _describe_ranks(self) -> str:
        ready, kv_config = self._ready, self.config.kv_cache
        weights = self.config.model.quantization or ready.dtype
        in_int8 = " in int8" if kv_config.device_dtype == "int8" else ""
        return (
            f"{ready.hardware}, weights in {weights}, {ready.num_blocks} KV blocks of "
            f"{kv_config.block_size} tokens{in_int8} and {ready.num_host_blocks} on the host "
            f"({kv_config.strategy})"
        )

    def _observe(self, step: Step, elapsed_s: float) -> None:
        """An iteration has ended: let the predictions follow the machine."""
        if self.profile.observe(IterationLoad.of_step(step), elapsed_s):
            self._loop.policy.recalibrate()
            if (now := self.clock.now()) >= self._next_drift_log_s:
                self._next_drift_log_s = now + _DRIFT_LOG_INTERVAL_S
                _log.info(
                    "iterations take %.2f (decode) and %.2f (with prefill) times the profile's "
                    "prediction",
                    self.profile.decode_ratio,
                    self.profile.prefill_ratio,
                )
