"""The engine: starts the ranks, admits jobs, and runs the step loop on a thread of its own.

Everything else talks to the loop through an inbox of arrivals and cancellations, which the thread
takes between two turns.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from array import array
from collections.abc import Sequence

from fastserve_backend.clock import Clock, MonotonicClock
from fastserve_backend.config import EngineConfig
from fastserve_backend.counters import EngineCounters, EngineSnapshot
from fastserve_backend.delivery import Delivery
from fastserve_backend.errors import (
    DrainingError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from fastserve_backend.executor.base import OwnedExecutor
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.executor.simulated import load_of
from fastserve_backend.job import FinishReason, Job, OutputSink
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.swap_costs import SwapCosts
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.models.config import ModelConfig, load_model_config
from fastserve_backend.models.partition import check_parallel
from fastserve_backend.models.tokenizer import TokenizationError, Tokenizer, load_tokenizer
from fastserve_backend.profile.correction import CorrectedLatency
from fastserve_backend.profile.latency import Identity
from fastserve_backend.profile.loads import Limits
from fastserve_backend.profile.measure import cache_path, link_of, load_or_measure
from fastserve_backend.sampling_params import MAX_SEED, SamplingParams
from fastserve_backend.scheduler.registry import check_batch_limits, make_policy
from fastserve_backend.step_loop import StepLoop
from fastserve_backend.worker.messages import Ready, Setup, Step

# How often an idle engine looks whether its ranks are alive.
IDLE_CHECK_S = 0.5
# How long close() waits for the loop to end: one iteration, and the ranks' own time to stop.
CLOSE_TIMEOUT_S = 60.0
_log = logging.getLogger(__name__)


class _Stop:
    """Inbox item: end the loop."""


class Engine:
    """Serves jobs on one set of ranks. ``start`` before anything else; ``close`` at the end."""

    tokenizer: Tokenizer
    model_config: ModelConfig
    profile: CorrectedLatency

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        executor: OwnedExecutor | None = None,
        check_integrity: bool = False,
    ) -> None:
        """``check_integrity`` verifies the block tables after every step, for tests."""
        self.config = config
        self.clock = clock or MonotonicClock()
        self.counters = EngineCounters()
        self.failure: str | None = None
        """Why the engine is broken: all jobs have failed and new ones raise EngineError."""
        self._executor: OwnedExecutor = executor or DistributedExecutor()
        self._check_integrity = check_integrity
        self._inbox: queue.SimpleQueue[Job | int | _Stop] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._admission = threading.Condition()  # guards the next two
        self._num_unfinished = 0
        self._draining = False
        self._loop: StepLoop  # the engine's thread alone calls it

    # --- Life ---------------------------------------------------------------------------------

    def start(self, timeout_s: float = 600.0) -> None:
        """Load tokenizer and model, start the ranks, measure the latency profile.

        Raises:
            ConfigError, ModelError: the configuration or the model cannot be used.
            EngineError: a rank died or was not ready within ``timeout_s``.
        """
        try:
            ready = self._load(timeout_s)
        except BaseException:
            self._executor.close()
            raise
        policy = make_policy(self.config.scheduler, self.profile, self.model_config.max_model_len)
        kv_config = self.config.kv_cache
        tiers = TwoTierKV(
            ready.num_blocks,
            ready.num_host_blocks,
            kv_config.block_size,
            incremental=kv_config.incremental,
        )
        costs = SwapCosts(self.profile, ready.block_bytes, link_of(ready))
        self._loop = StepLoop(
            policy,
            KVManager(tiers, policy, kv_config, costs, self.counters),
            self._executor,
            Delivery(self.tokenizer),
            self.clock,
            eos_token_ids=self.model_config.eos_token_ids,
            counters=self.counters,
            on_end=self._count_end,
            on_iteration=self._observe,
            check_integrity=self._check_integrity,
        )
        _log.info(
            "ready: %s, %s, %d KV blocks of %d tokens and %d on the host (%s), %s",
            self.config.model.model,
            ready.hardware,
            ready.num_blocks,
            kv_config.block_size,
            ready.num_host_blocks,
            kv_config.strategy,
            policy.describe(),
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new jobs and wait until none is left; False if some are after ``timeout_s``."""
        with self._admission:
            self._draining = True
            return self._admission.wait_for(lambda: self._num_unfinished == 0, timeout_s)

    def close(self) -> None:
        """Cancel what is left and stop the ranks; idempotent."""
        with self._admission:
            self._draining = True
        if self._thread is not None:
            self._inbox.put(_Stop())
            self._thread.join(CLOSE_TIMEOUT_S)
            self._thread = None
        else:
            self._executor.close()

    # --- Jobs ---------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidRequestError: nothing to continue, or too long for the model (a text that is
                hopelessly long is refused before it costs the time to tokenize it).
        """
        max_tokens = self.model_config.max_model_len - 1
        if len(text) > max_tokens * self.tokenizer.max_token_bytes:
            raise InvalidRequestError(
                "text_input",
                f"{len(text)} characters",
                f"the model takes at most {max_tokens} tokens",
            )
        try:
            ids = self.tokenizer.encode(text)
        except TokenizationError as error:
            raise InvalidRequestError("text_input", text, str(error)) from None
        if not ids:
            raise InvalidRequestError("text_input", text, "must give at least one token")
        return ids

    def submit(
        self, job_id: str, prompt_ids: Sequence[int], params: SamplingParams, sink: OutputSink
    ) -> int:
        """Accept a job and return its number; ``sink`` then gets its outputs and one end.

        Raises:
            InvalidRequestError: the prompt is empty, has unknown tokens, or the job is too long.
            OverloadedError, DrainingError: not now.
            EngineError: the engine is broken.
        """
        try:
            self.validate(prompt_ids, params)
            job = Job(
                id=job_id,
                number=next(self._numbers),
                prompt_ids=array("i", prompt_ids),
                params=params,
                arrival_s=self.clock.now(),
                sink=sink,
                seed=random.randint(0, MAX_SEED) if params.seed is None else params.seed,
            )
            self._admit(job)
        except (InvalidRequestError, OverloadedError, DrainingError):
            self.counters.rejected += 1
            raise
        return job.number

    def cancel(self, number: int) -> None:
        """End the job with CANCELLED after the running iteration; unknown numbers are ignored."""
        self._inbox.put(number)

    def snapshot(self) -> EngineSnapshot:
        """For metrics and tests, from any thread."""
        running, kv = self._loop.num_running, self._loop.kv
        device, host = kv.tiers.device, kv.tiers.host
        return EngineSnapshot(
            running=running,
            waiting=max(0, self._num_unfinished - running),
            level_sizes=tuple(self._loop.policy.level_sizes()),
            swapped=kv.num_swapped_out,
            num_blocks=device.num_blocks,
            free_blocks=device.num_free,
            num_host_blocks=host.num_blocks,
            free_host_blocks=host.num_free,
        )

    def validate(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises InvalidRequestError if this model and cache can never serve such a job."""
        vocab_size = self.model_config.vocab_size
        if len(prompt_ids) == 0:
            raise InvalidRequestError("input_ids", "no tokens", "must have at least one token")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
            bad = next(token for token in prompt_ids if not 0 <= token < vocab_size)
            raise InvalidRequestError("input_ids", bad, f"token ids are 0 to {vocab_size - 1}")
        limit = self.model_config.max_model_len
        total = len(prompt_ids) + params.max_tokens
        if len(prompt_ids) >= limit:
            raise InvalidRequestError(
                "text_input", f"{len(prompt_ids)} tokens", f"the model takes at most {limit - 1}"
            )
        if total > limit:
            raise InvalidRequestError(
                "max_tokens",
                params.max_tokens,
                f"the prompt has {len(prompt_ids)} tokens and the model takes {limit} in all, "
                f"so at most {limit - len(prompt_ids)}",
            )
        device = self._loop.kv.tiers.device
        capacity = device.num_blocks * device.block_size
        if total > capacity:
            raise InvalidRequestError(
                "max_tokens",
                params.max_tokens,
                f"prompt and output together are {total} tokens and the KV cache holds {capacity}",
            )

    def _admit(self, job: Job) -> None:
        limit = self.config.scheduler.max_queued_requests
        with self._admission:
            if self.failure is not None:
                raise EngineError(self.failure)
            if self._draining:
                raise DrainingError("the server is shutting down and takes no new requests")
            if self._num_unfinished >= limit:
                raise OverloadedError(f"{limit} requests are queued already; try again later")
            self._num_unfinished += 1
            self._inbox.put(job)

    # --- The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine was closed"
        try:
            while self._take_inbox():
                self._loop.turn()
            self._loop.cancel_all()
        except EngineError as error:
            reason = str(error)
            _log.error("%s; all jobs fail", reason)
        except Exception:
            reason = "internal error in the engine; see the server's log"
            _log.exception("the engine's loop failed; all jobs fail")
        finally:
            self._fail(reason)
            self._executor.close()

    def _take_inbox(self) -> bool:
        """Arrivals and cancellations; waits for one if there is nothing to do. False to stop."""
        wait = self._loop.is_idle
        while True:
            try:
                item = self._inbox.get(block=wait, timeout=IDLE_CHECK_S)
            except queue.Empty:
                return True
            wait = False
            if isinstance(item, _Stop):
                return False
            if isinstance(item, Job):
                self._loop.add(item)
            else:
                self._loop.cancel(item)

    def _fail(self, reason: str) -> None:
        """Refuse new jobs from now on and end all that are left with ERROR."""
        with self._admission:
            self.failure = reason
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Job):  # admitted before the failure was visible
                self._loop.add(item)
        self._loop.fail_all(reason)

    def _count_end(self, job: Job, reason: FinishReason) -> None:
        self.counters.finished[reason.value] += 1
        with self._admission:
            self._num_unfinished -= 1
            self._admission.notify_all()

    # --- Start --------------------------------------------------------------------------------

    def _load(self, timeout_s: float) -> Ready:
        model = self.config.model
        self.model_config = load_model_config(
            model.model,
            load_format=model.load_format,
            device="cuda" if model.device == "cuda" else "cpu",
            dtype=model.dtype,
            max_model_len=model.max_model_len,
        )
        parallel = self.config.parallel
        check_parallel(
            self.model_config, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        self.tokenizer = load_tokenizer(model.model, model.tokenizer, self.model_config)
        check_batch_limits(self.config.scheduler, self.model_config.max_model_len)
        ready = self._executor.start(Setup.of(self.config), timeout_s)
        self.profile = self._load_profile(ready)
        return ready

    def _load_profile(self, ready: Ready) -> CorrectedLatency:
        identity = Identity.of(
            self.model_config,
            hardware=ready.hardware,
            dtype=ready.dtype,
            block_size=self.config.kv_cache.block_size,
            parallel=self.config.parallel,
        )
        limits = Limits.of(self.config, self.model_config.max_model_len, ready.num_blocks)
        return CorrectedLatency(
            load_or_measure(
                cache_path(identity),
                identity,
                self._executor,
                self.clock.now,
                limits,
                link_of(ready),
            )
        )

    def _observe(self, step: Step, elapsed_s: float) -> None:
        """An iteration has ended: let the predictions follow the machine."""
        if self.profile.observe(load_of(step), elapsed_s):
            self._loop.policy.recalibrate()
            _log.info(
                "iterations take %.2f (decode) and %.2f (with prefill) times the profile's "
                "prediction",
                self.profile.decode_ratio,
                self.profile.prefill_ratio,
            )
