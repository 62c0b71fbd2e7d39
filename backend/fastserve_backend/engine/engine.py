"""The engine: accepts jobs, and runs the step loop on a thread of its own over real ranks.

Other threads talk to that thread through an inbox: arrivals, cancellations and answers, which it
takes between two cycles of the loop.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fastserve_backend.checkpoints.configured_model import load_model_and_tokenizer
from fastserve_backend.checkpoints.generation_defaults import load_generation_defaults
from fastserve_backend.config import EngineConfig
from fastserve_backend.config_sections import START_TIMEOUT_S
from fastserve_backend.engine.admission import Admission
from fastserve_backend.engine.delivery import TextDelivery
from fastserve_backend.engine.inbox import Inbox
from fastserve_backend.engine.loop_setup import LoopSetup
from fastserve_backend.engine.picture import take_picture, take_snapshot
from fastserve_backend.engine.rank_factory import RankFactory
from fastserve_backend.engine.request_checks import RequestChecks
from fastserve_backend.engine.request_log import log_end
from fastserve_backend.engine.service_levels import resolve_service
from fastserve_backend.engine.supervision import RankSupervisor, StartedRanks
from fastserve_backend.engine.watches import StateSink, Watches
from fastserve_backend.errors import EngineError
from fastserve_backend.executor.base import OwnedExecutor
from fastserve_backend.grammars.client import GrammarClient
from fastserve_backend.grammars.messages import FromGrammars, Vocabulary
from fastserve_backend.job import DEFAULT_SERVICE, FinishReason, Job, OutputSink, ServiceLevel
from fastserve_backend.job_trace import JobTrace
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.session_history import SessionHistory
from fastserve_backend.length_prediction.job_predictions import JobPredictions
from fastserve_backend.length_prediction.messages import Predicted
from fastserve_backend.length_prediction.settings import PredictorSettings
from fastserve_backend.metrics.counters import EngineCounters, EngineSnapshot
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.profile.contradiction import Contradiction
from fastserve_backend.profile.correction import CorrectedLatency, DriftLog
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.sampling_params import MAX_SEED, SamplingParams
from fastserve_backend.system.clock import Clock, MonotonicClock

# How often an idle engine checks that its ranks are alive.
IDLE_CHECK_S = 0.5
# How long close() waits for the thread to end: one step, and the ranks' own time to stop.
CLOSE_TIMEOUT_S = 60.0
# With fewer seats, clients wait that need not: the testbed of FastServe's paper has 16.
_FEW_SEATS = 16
_log = logging.getLogger(__name__)


class _Stop:
    """Inbox item: end the thread."""


class _Wake:
    """Inbox item: stop waiting for the inbox, something else has news."""


# An arrival, the number of a job to cancel, an answer, or one of the two above.
_InboxItem = Job | int | Predicted | FromGrammars | _Stop | _Wake


class Engine:
    """Serves jobs; all methods may be called from any thread. ``close`` it at the end.

    The constructor loads tokenizer and model, starts the ranks and measures their latency profile.

    Args:
        rank_factory: makes the ranks of the configuration. The engine closes it at its end; if this
            constructor raises, the caller has to. None: the engine makes one.
        make_executor: makes other ranks, at the start and whenever they are replaced.
        start_timeout_s: how long a start of the ranks may take.
        check_integrity: verify the block tables after every step, for tests.

    Raises:
        ConfigError, ModelError: the configuration or the model cannot be used.
        EngineError: a rank died, or was not ready in time.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        rank_factory: RankFactory | None = None,
        make_executor: Callable[[], OwnedExecutor] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        check_integrity: bool = False,
    ) -> None:
        self.config = config
        self.clock = clock or MonotonicClock()
        self.counters = EngineCounters(LatencyHistograms(config.scheduler.slo_ms / 1e3))
        self.gave_up = False
        """Whether the engine failed because the ranks were restarted too often."""
        weights = config.tenants.read_weights()
        self._admission = Admission(config.scheduler.max_queued_requests, config.tenants, weights)
        self._inbox: Inbox[_InboxItem] = Inbox()
        self._watches = Watches()
        self._job_numbers = itertools.count()
        self._num_turns = 0  # of the loop
        predictor = PredictorSettings.of(config)
        with ExitStack() as undo:
            if make_executor is None:
                rank_factory = rank_factory or RankFactory(config.parallel)
                make_executor = partial(rank_factory.make, self._inbox.descriptor)
            self._rank_factory = rank_factory
            undo.callback(self._close_rank_factory)
            executor = make_executor()
            undo.callback(executor.close)
            undo.callback(executor.kill)  # before: ranks that import hear nothing
            self.model_config, self.tokenizer = load_model_and_tokenizer(config)
            self._sampling_defaults = (
                load_generation_defaults(self.model_config)
                if config.model.generation_config == "auto"
                else {}
            )
            self.predictions: JobPredictions | None = None
            """Predictions of output lengths, if the configuration asks for them."""
            if predictor is not None:  # before the ranks: both load at the same time
                self.predictions = JobPredictions(predictor, self.tokenizer.decode, self._inbox.put)
            undo.callback(self._close_predictions)
            self._supervisor = RankSupervisor(
                config,
                self.model_config,
                self.clock,
                self.counters,
                self._admission,
                executor,
                make_executor,
                start_timeout_s,
            )
            undo.callback(self._supervisor.close)
            ranks = self._supervisor.ranks
            self.profile = CorrectedLatency(ranks.profile)
            self._drift_log = DriftLog(self.profile)
            self._contradiction = Contradiction()
            self._logs_requests = config.scheduler.log_requests
            self._grammars = GrammarClient(self._vocabulary, self._inbox.put)
            self._setup = LoopSetup(
                config.scheduler,
                config.kv_cache,
                self.profile,
                self.counters,
                self.model_config.max_model_len,
                self.model_config.rotary_switch,
                weights if config.tenants.fair_shares else None,
                SessionHistory(
                    config.kv_cache.session_ttl_s,
                    self.profile,
                    inherits_age=config.scheduler.session_age,
                ),
            )
            self._loop = self._setup.make_loop(
                ranks.memory,
                ranks.executor,
                TextDelivery(self.tokenizer),
                self.clock,
                eos_token_ids=self.model_config.eos_token_ids,
                on_job_end=self._on_job_end,
                on_step_finished=self._on_step_finished,
                mask_source=self._grammars,
                check_integrity=check_integrity,
            )
            undo.pop_all()
        self.checks = RequestChecks(
            self.model_config, self.tokenizer, lambda: self._loop.kv.tiers.longest_job
        )
        _log.info(
            "ready: %s, %s, %s",
            config.model.model,
            self._supervisor.describe(),
            self._loop.policy.describe(),
        )
        self._warn_of_busy_profile()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the engine is broken: all jobs have failed and new ones raise EngineError."""
        return self._admission.failure

    @property
    def progress(self) -> tuple[int, float]:
        """Changes at least once a second while the engine's thread works, also in a long step: the
        turns of its loop, and the seconds for which it has listened to the ranks."""
        return self._num_turns, self._supervisor.ranks.executor.listened_s

    def drain(self, timeout_s: float) -> bool:
        """Refuse new jobs and wait until none is left; False if some are after ``timeout_s``."""
        self._watches.close()
        self._admission.close()
        return self._admission.wait_until_empty(timeout_s)

    def close(self) -> None:
        """Cancel what is left and stop the ranks; idempotent, and each call returns when that is
        done. A sink must not call it: the engine's thread would wait for itself."""
        self._admission.close()
        self._inbox.put(_Stop())
        self._thread.join(CLOSE_TIMEOUT_S)
        self._close_predictions()

    # --- Requests -----------------------------------------------------------------------------

    def submit(
        self,
        job_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: OutputSink,
        *,
        service: ServiceLevel = DEFAULT_SERVICE,
        earlier_ids: Sequence[int] | NDArray[np.int32] = (),
        prompt_text: str | None = None,
        trace: JobTrace | None = None,
    ) -> int:
        """Accept a job and return its number; ``sink`` then gets its outputs and one end.

        Args:
            params: the model's own defaults replace what they leave out.
            service: the server's objectives replace those that it leaves out.
            earlier_ids: the answer goes on after this output, [n], which its client has from a
                server that was lost. ``params`` are those of the whole answer.
            prompt_text: the user's words, from which the length of the answer is predicted if the
                configuration asks for that; default: the text of ``prompt_ids``.
            trace: gets what happens to the job, if somebody traces it.

        Raises:
            InvalidRequestError: the prompt is empty, has unknown tokens, or the job is too long;
                its tokens' rules leave no choice; its service level is not allowed; or the
                answer cannot go on after ``earlier_ids``.
            OverloadedError, DrainingError: no job is accepted now, or a ``TenantLimitError``.
            EngineError: the engine is broken.
        """
        self.checks.validate(prompt_ids, params)
        rules = self.checks.token_rules(params)
        earlier, params = self.checks.rest_of_answer(earlier_ids, params)
        service = resolve_service(service, self.config)
        job = Job(
            id=job_id,
            number=next(self._job_numbers),
            prompt_ids=array("i", prompt_ids) + array("i", earlier),
            params=params.with_model_defaults(self._sampling_defaults),
            arrival_s=self.clock.now(),
            service=service,
            sink=sink,
            seed=random.randint(0, MAX_SEED) if params.seed is None else params.seed,
            num_earlier=len(earlier),
            rules=rules,
            trace=trace,
        )
        predictions = self.predictions
        if predictions is not None:
            prompt_text = predictions.text_of(prompt_ids, prompt_text)
        with self._admission.accept_job(job):
            self._inbox.put(job)
            # The answer reaches the inbox after the job. The end of the job waits for this block.
            if predictions is not None and prompt_text is not None:
                predictions.ask(job, prompt_text)
        return job.number

    def cancel(self, number: int) -> None:
        """End the job with CANCELLED after the running step; unknown numbers are ignored."""
        self._inbox.put(number)

    def watch(self, interval_s: float, sink: StateSink) -> int:
        """Show ``sink`` the engine's state every ``interval_s``, beginning now; returns a number
        for ``unwatch``. Each picture takes time of the engine's thread.

        Raises:
            OverloadedError, DrainingError: no watcher is accepted now.
            EngineError: the engine is broken.
        """
        self._admission.check_not_broken()
        number = self._watches.add(interval_s, sink)
        self._inbox.put(_Wake())
        return number

    def unwatch(self, number: int) -> None:
        """End the watch; its sink is not called again. Unknown numbers are ignored."""
        self._watches.remove(number)

    def snapshot(self) -> EngineSnapshot:
        """The state for metrics and tests."""
        return take_snapshot(self._loop, self._admission.num_unfinished)

    # --- The engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine was closed"
        try:
            self._serve()
            self._loop.jobs.cancel_all()
        except EngineError as error:
            reason = str(error)
            self.gave_up = True
            _log.error("%s; all jobs fail", reason)
            self._supervisor.kill()
        except Exception:
            reason = "internal error in the engine; see the server's log"
            _log.exception("the engine's loop failed; all jobs fail")
        finally:
            self._fail(reason)
            self._supervisor.close()
            self._close_rank_factory()
            self._grammars.close()

    def _serve(self) -> None:
        """Returns when the engine is closed.

        Raises:
            EngineError: ranks died or hung more often than they are restarted.
        """
        while self._take_inbox(wait=self._loop.is_idle):
            try:
                self._loop.run_cycle()
            except EngineError as error:
                self._loop.suspend(self._new_kv())
                if not self._supervisor.restart(error, self._wait_for_ranks):
                    return
                self._use_fresh_ranks()

    def _wait_for_ranks(self, fresh: Future[StartedRanks]) -> bool:
        """Takes jobs and cancellations until ``fresh`` is done; False if the engine is closed."""
        fresh.add_done_callback(lambda _: self._inbox.put(_Wake()))
        while not fresh.done():
            if not self._take_inbox(wait=True):
                return False
        return True

    def _use_fresh_ranks(self) -> None:
        ranks = self._supervisor.ranks
        if ranks.profile is not self.profile.model:
            self.profile.replace(ranks.profile)
            self._contradiction = Contradiction()
            self._loop.policy.recalibrate()
        self._loop.resume(ranks.executor, self._new_kv())

    def _new_kv(self) -> KVManager:
        """For the latest ranks; no job has KV on them."""
        return self._setup.make_kv(self._supervisor.ranks.memory, self._loop.policy)

    def _take_inbox(self, *, wait: bool) -> bool:
        """Take all items; with ``wait``, wait a while for the first. False if closed."""
        self._num_turns += 1
        self._show_watchers()
        self._inbox.start_taking()
        timeout_s = min(IDLE_CHECK_S, self._watches.due_in_s(self.clock.now()))
        jobs = self._loop.jobs
        while True:
            wait_s = timeout_s if wait else self._loop.mask_wait_s
            try:
                item = self._inbox.get(wait_s)
            except queue.Empty:
                return True
            wait = False
            if isinstance(item, _Stop):
                return False
            if isinstance(item, Job):
                jobs.add(item)
            elif isinstance(item, int):
                jobs.cancel(item)
            elif isinstance(item, Predicted):
                self._on_prediction(item)
            elif not isinstance(item, _Wake):
                jobs.on_mask_answer(item)

    def _on_prediction(self, answer: Predicted) -> None:
        assert self.predictions is not None
        num_tokens = answer.num_tokens
        if num_tokens is None or self._loop.jobs.on_prediction(answer.number, num_tokens):
            self.predictions.on_predicted(answer, self.clock.now())

    def _show_watchers(self) -> None:
        now = self.clock.now()
        if self._watches.due_in_s(now) > 0:
            return
        policy = self.config.scheduler.policy
        state = take_picture(now, policy, self._loop, self.counters, self.profile)
        self._watches.show(now, state)

    def _fail(self, reason: str) -> None:
        """Refuse new jobs from now on and end all that are left with ERROR."""
        self._admission.fail(reason)
        self._watches.close()
        while True:
            try:
                item = self._inbox.get()
            except queue.Empty:
                break
            if isinstance(item, Job):  # accepted before it was refused
                self._loop.jobs.add(item)
        self._loop.jobs.fail_all(reason)

    def _on_job_end(self, job: Job, reason: FinishReason) -> None:
        if job.refusal is None:
            self.counters.finished[reason.value] += 1
        else:
            self.counters.refused += 1
        now = self.clock.now()
        self._admission.on_job_end(job, now)
        if self._logs_requests:
            log_end(job, reason, now)
        if self.predictions is not None:
            self.predictions.on_job_ended(job)

    def _on_step_finished(self, step: Step, elapsed_s: float) -> None:
        """Correct the predictions by what the step took."""
        if self.profile.observe(IterationLoad.of_step(step), elapsed_s):
            policy = self._loop.policy
            policy.recalibrate()
            self._drift_log.on_drift(self.clock.now(), policy.limits.max_seqs)
        if self._contradiction.observe(self.profile.decode_ratio):
            self._supervisor.on_profile_contradicted()

    def _warn_of_busy_profile(self) -> None:
        limits = self._loop.policy.limits
        num_seats = limits.max_seqs
        are_few = limits.bound_by_times and num_seats < _FEW_SEATS
        if are_few and self._supervisor.ranks.profile.busy:
            _log.warning(
                "at most %d job%s (measured on a busy machine? fastserve profile); there are more "
                "once iterations turn out to be faster",
                num_seats,
                "" if num_seats == 1 else "s",
            )

    # --- Parts --------------------------------------------------------------------------------

    def _vocabulary(self) -> Vocabulary:
        vocab_size = self.model_config.vocab_size
        tokens = [self.tokenizer.token_bytes(one) for one in range(vocab_size)]
        specials = {
            one: text.encode()
            for one, text in self.tokenizer.specials.items()
            if one < vocab_size and not tokens[one]
        }
        return Vocabulary(tokens, specials, self.model_config.eos_token_ids)

    def _close_rank_factory(self) -> None:
        if self._rank_factory is not None:
            self._rank_factory.close()

    def _close_predictions(self) -> None:
        if self.predictions is not None:
            self.predictions.close()
