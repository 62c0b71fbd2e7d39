"""The engine: the step loop, and the only one who changes jobs and block tables.

One thread runs ``take arrivals and cancellations → select → plan KV → send the step → deliver the
tokens of the step before while the ranks work → receive tokens → update jobs``. Everything else
talks to it through thread-safe methods.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import platformdirs

from fastserve_backend.clock import Clock, MonotonicClock
from fastserve_backend.config import EngineConfig
from fastserve_backend.delivery import Delivery, NewToken
from fastserve_backend.errors import (
    ConfigError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from fastserve_backend.executor.base import Executor
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.job import FinishReason, Job, JobState, OutputSink
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.planner import plan
from fastserve_backend.models.config import ModelConfig, load_model_config
from fastserve_backend.models.tokenizer import TokenizationError, Tokenizer, load_tokenizer
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.measure import load_or_measure
from fastserve_backend.sampling_params import MAX_SEED, SamplingParams
from fastserve_backend.scheduler.base import Policy
from fastserve_backend.scheduler.registry import make_policy
from fastserve_backend.step_builder import build_step
from fastserve_backend.worker.messages import Ready, Setup, StepResult

# How often an idle engine looks whether its ranks are alive.
IDLE_CHECK_S = 0.5
# How long close() waits for the loop to end: one iteration, and the ranks' own time to stop.
CLOSE_TIMEOUT_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start; only the engine's thread writes them."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    iterations: int = 0
    compute_s: float = 0.0
    """Seconds that the ranks computed."""
    iteration_s: float = 0.0
    """Seconds from sending a step to having its tokens; what exceeds ``compute_s`` is messaging."""
    between_s: float = 0.0
    """Seconds from having a step's tokens to sending the next step: the ranks were idle."""
    preemptions: int = 0
    recomputed_jobs: int = 0
    """Jobs whose KV was dropped for want of blocks, and had to be computed again."""
    finished: Counter[str] = field(default_factory=Counter)
    """Jobs by finish reason."""
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at one moment."""

    running: int
    waiting: int
    level_sizes: tuple[int, ...]
    """Jobs in each queue of the policy, highest first."""
    num_blocks: int
    free_blocks: int


class _Stop:
    """Inbox item: end the loop."""


class Engine:
    """Serves jobs on one set of ranks. ``start`` before anything else; ``close`` at the end."""

    tokenizer: Tokenizer
    model_config: ModelConfig
    profile: LatencyProfile

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        executor: Executor | None = None,
        check_integrity: bool = False,
    ) -> None:
        """``check_integrity`` verifies the block tables after every step, for tests."""
        self.config = config
        self.clock = clock or MonotonicClock()
        self.counters = EngineCounters()
        self.failure: str | None = None
        """Why the engine is broken: all jobs have failed and new ones raise EngineError."""
        self._executor: Executor = executor or DistributedExecutor()
        self._check_integrity = check_integrity
        self._inbox: queue.SimpleQueue[Job | int | _Stop] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._admission = threading.Condition()  # guards the next two
        self._num_unfinished = 0
        self._draining = False
        # The engine's thread alone touches what follows.
        self._jobs: dict[int, Job] = {}
        self._previous_batch: list[Job] = []
        self._last_result_s: float | None = None
        self._policy: Policy
        self._pool: BlockPool
        self._delivery: Delivery

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
        self._policy = make_policy(
            self.config.scheduler, self.profile, self.model_config.max_model_len
        )
        self._delivery = Delivery(self.tokenizer)
        _log.info(
            "ready: %s, %s, %d KV blocks of %d tokens, %s",
            self.config.model.model,
            ready.hardware,
            ready.num_blocks,
            self._pool.block_size,
            self._policy.describe(),
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
        running = len(self._previous_batch)
        return EngineSnapshot(
            running=running,
            waiting=max(0, self._num_unfinished - running),
            level_sizes=tuple(self._policy.level_sizes()),
            num_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free,
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
        capacity = self._pool.num_blocks * self._pool.block_size
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

    # --- The loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the engine was closed"
        try:
            for step_id in itertools.count():
                if not self._take_inbox():
                    for job in list(self._jobs.values()):
                        self._cancel(job)
                    break
                self._iterate(step_id)
        except EngineError as error:
            reason = str(error)
            _log.error("%s; all jobs fail", reason)
        except Exception:
            reason = "internal error in the engine; see the server's log"
            _log.exception("the engine's loop failed; all jobs fail")
        finally:
            self._fail(reason)
            self._executor.close()

    def _iterate(self, step_id: int) -> None:
        batch = self._schedule()
        if not batch:
            self._last_result_s = None
            for job in self._delivery.flush():
                self._end(job, FinishReason.STOP)
            self._executor.check()
            return
        decodes = [job for job in batch if job.num_uncomputed == 1]
        batch = decodes + [job for job in batch if job.num_uncomputed > 1]
        step = build_step(step_id, batch, len(decodes), self._pool)
        started_s = self.clock.now()
        self._executor.submit(step)
        # The host's work for the last step, while the ranks compute this one. A job that a stop
        # word ends here may be part of this step: its blocks are freed after it, its new token
        # ignored.
        stopped = self._delivery.flush()
        result = self._executor.collect()
        now = self.clock.now()
        self._policy.iteration_done(batch, now - started_s, now)
        self.counters.iterations += 1
        self.counters.compute_s += result.compute_s
        self.counters.iteration_s += now - started_s
        if self._last_result_s is not None:
            self.counters.between_s += started_s - self._last_result_s
        self._last_result_s = now
        for job in stopped:
            self._end(job, FinishReason.STOP)
        self._apply(batch, result, now)
        if self._check_integrity:
            self._pool.check_integrity()

    def _take_inbox(self) -> bool:
        """Arrivals and cancellations; waits for one if there is nothing to do. False to stop."""
        wait = not self._jobs and self._delivery.is_empty
        while True:
            try:
                item = self._inbox.get(block=wait, timeout=IDLE_CHECK_S)
            except queue.Empty:
                return True
            wait = False
            if isinstance(item, _Stop):
                return False
            if isinstance(item, Job):
                self._jobs[item.number] = item
                self._policy.add(item, item.arrival_s)
                self._delivery.open(item)
                self.counters.prompt_tokens += len(item.prompt_ids)
            elif (job := self._jobs.get(item)) is not None:
                self._cancel(job)

    def _schedule(self) -> list[Job]:
        """The next batch, all its blocks allocated; empty only if there is no job."""
        if not self._jobs:
            self._previous_batch = []
            return []
        now = self.clock.now()
        selected = self._policy.select(now)
        kv = plan(selected, self._policy.by_lowest_priority(), self._pool)
        for job in kv.dropped:
            job.num_computed = 0
            self.counters.recomputed_jobs += 1
        if len(kv.scheduled) < len(selected):
            chosen = {job.number for job in kv.scheduled}
            self._policy.not_run([job for job in selected if job.number not in chosen])
        for job in self._previous_batch:
            if job.state is JobState.RUNNING:
                job.state = JobState.PREEMPTED
        for job in kv.scheduled:
            job.state = JobState.RUNNING
            if job.first_scheduled_s is None:
                job.first_scheduled_s = now
        for job in self._previous_batch:
            if job.state is JobState.PREEMPTED:
                job.num_preemptions += 1
                self.counters.preemptions += 1
        self._previous_batch = kv.scheduled
        return kv.scheduled

    def _apply(self, batch: Sequence[Job], result: StepResult, now: float) -> None:
        for job, token in zip(batch, NewToken.from_result(result), strict=True):
            if job.state is not JobState.RUNNING:
                continue  # a stop word ended it while this iteration ran
            job.num_computed = job.num_tokens
            job.output_ids.append(token.token_id)
            job.cumulative_logprob += token.logprob
            if job.first_token_s is None:
                job.first_token_s = now
            job.last_token_s = now
            self.counters.generation_tokens += 1
            reason = self._finish_reason(job, token.token_id)
            self._delivery.add(job, token, reason)
            if reason is not None:
                self._end(job, reason)

    def _finish_reason(self, job: Job, token_id: int) -> FinishReason | None:
        if not job.params.ignore_eos and token_id in self.model_config.eos_token_ids:
            return FinishReason.STOP
        if len(job.output_ids) >= job.params.max_tokens:
            return FinishReason.LENGTH
        return None

    def _cancel(self, job: Job) -> None:
        self._delivery.close(job, FinishReason.CANCELLED)
        self._end(job, FinishReason.CANCELLED)

    def _end(self, job: Job, reason: FinishReason) -> None:
        """Forget the job and free its blocks. Only between iterations, when no step uses them."""
        del self._jobs[job.number]
        job.state = JobState.FINISHED
        self._policy.remove(job)
        self._pool.release(job.number)
        self._count_end(reason)

    def _fail(self, reason: str) -> None:
        """End every job with ERROR, whatever state the loop has left them in."""
        with self._admission:
            self.failure = reason
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Job):  # admitted before the failure was visible
                self._jobs[item.number] = item
                self._delivery.open(item)
        for job in self._jobs.values():
            job.state = JobState.FINISHED
            self._delivery.close(job, FinishReason.ERROR, reason)
            self._count_end(FinishReason.ERROR)
        self._jobs.clear()

    def _count_end(self, reason: FinishReason) -> None:
        self.counters.finished[reason.value] += 1
        with self._admission:
            self._num_unfinished -= 1
            self._admission.notify_all()

    def _load(self, timeout_s: float) -> Ready:
        model = self.config.model
        self.model_config = load_model_config(
            model.model,
            load_format=model.load_format,
            device="cuda" if model.device == "cuda" else "cpu",
            dtype=model.dtype,
            max_model_len=model.max_model_len,
        )
        self.tokenizer = load_tokenizer(model.model, model.tokenizer, self.model_config)
        max_model_len = self.model_config.max_model_len
        if self.config.scheduler.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                "scheduler.max_num_batched_tokens: got "
                f"{self.config.scheduler.max_num_batched_tokens}; one prompt may have as many "
                "tokens as the model allows, so it must be at least model.max_model_len "
                f"({max_model_len})"
            )
        ready = self._executor.start(self._setup(), timeout_s)
        self._pool = BlockPool(ready.num_blocks, self.config.kv_cache.block_size)
        self.profile = self._load_profile(ready)
        return ready

    def _setup(self) -> Setup:
        model, kv = self.config.model, self.config.kv_cache
        return Setup(
            model=model.model,
            load_format=model.load_format,
            dtype=model.dtype,
            max_model_len=model.max_model_len,
            device=model.device,
            block_size=kv.block_size,
            device_memory_utilization=kv.device_memory_utilization,
            device_blocks=kv.device_blocks,
        )

    def _load_profile(self, ready: Ready) -> LatencyProfile:
        shape = asdict(self.model_config)
        # Times do not depend on where the weights come from; the rank knows the real dtype.
        for key in ("name", "directory", "load_format", "dtype"):
            del shape[key]
        return load_or_measure(
            Path(platformdirs.user_cache_dir("fastserve")) / "profiles",
            f"{shape} as {ready.dtype} on {ready.hardware}, block size {self._pool.block_size}",
            self._executor,
            self.clock.now,
            num_blocks=ready.num_blocks,
            block_size=self._pool.block_size,
            max_tokens=self.model_config.max_model_len,
            max_seqs=self.config.scheduler.max_num_seqs,
        )
