"""The engine's ranks: started, and replaced by fresh ones when one of them dies or hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.admission import Admission
from fastserve_backend.engine.loop_setup import KVMemory
from fastserve_backend.errors import ConfigError, EngineError, FastServeError
from fastserve_backend.executor.base import OwnedExecutor
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.profile.cache import (
    cache_path_if_any,
    load_or_measure,
    mark_contradicted,
)
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.measure import ReadyRanks
from fastserve_backend.rank_protocol.layer_kinds import LayerKind
from fastserve_backend.rank_protocol.messages import Ready, Setup
from fastserve_backend.system.clock import Clock
from fastserve_backend.system.restart_limit import RestartLimiter

# A start that is abandoned is told so this often: it may be between two processes the first time.
_ABANDON_POLL_S = 0.05
_log = logging.getLogger(__name__)


class StartedRanks(NamedTuple):
    """Ranks that have loaded the model."""

    executor: OwnedExecutor
    ready: Ready
    profile: LatencyProfile
    kinds: tuple[LayerKind, ...]
    """Of the model's layers."""

    @property
    def memory(self) -> KVMemory:
        return KVMemory.of_ranks(self.ready, self.kinds)


class RankSupervisor:
    """Owns the ranks. All methods are for the engine's thread.

    Args:
        executor: the first ranks, not started yet.
        make_executor: makes those that replace them.
        start_timeout_s: how long each start may take.

    Raises:
        ConfigError, ModelError: the configuration or the model cannot be used.
        EngineError: a rank died, or was not ready in time.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        clock: Clock,
        counters: EngineCounters,
        admission: Admission,
        executor: OwnedExecutor,
        make_executor: Callable[[], OwnedExecutor],
        start_timeout_s: float,
    ) -> None:
        self._config = config
        self._model = model
        self._clock = clock
        self._counters = counters
        self._admission = admission
        self._make_executor = make_executor
        self._start_timeout_s = start_timeout_s
        self._limiter = RestartLimiter()
        self._profile: LatencyProfile | None = None
        try:
            self.ranks = self._start(executor)
        except BaseException:
            executor.close()
            raise

    def restart(
        self, error: FastServeError, wait_for: Callable[[Future[StartedRanks]], bool]
    ) -> bool:
        """Replace the ranks, after ``error`` of the old ones; tries again when a start fails.

        Args:
            wait_for: returns True once the future is done, or False to give the start up.

        Returns:
            Whether there are fresh ranks. False: the start was given up.

        Raises:
            EngineError: there were too many restarts.
        """
        while True:
            self._count_restart(error)
            began_s = self._clock.now()
            replacement = RankReplacement(self.ranks.executor, self._make_executor, self._start)
            if not wait_for(replacement.future):
                replacement.abandon()
                return False
            try:
                self.ranks = replacement.future.result()
            except FastServeError as failed:
                error = failed
            else:
                took_s = self._clock.now() - began_s
                _log.info("the ranks are back after %.1f s: %s", took_s, self.describe())
                return True
            finally:
                self._limiter.leave_out(self._clock.now() - began_s)

    def describe(self) -> str:
        """Hardware, data types and sizes, for the log."""
        ready, kv_config = self.ranks.ready, self._config.kv_cache
        weights = self._model.weight_format if self._model.quantization else ready.dtype
        in_int8 = " in int8" if kv_config.device_dtype == "int8" else ""
        on_disk = f", {ready.num_disk_blocks} on the disk" if ready.num_disk_blocks else ""
        return (
            f"{ready.hardware}, weights in {weights}, {ready.num_blocks} KV blocks of "
            f"{kv_config.block_size} tokens{in_int8} and {ready.num_host_blocks} on the host"
            f"{on_disk} ({kv_config.strategy})"
        )

    def on_profile_contradicted(self) -> None:
        """Iterations are far shorter than the profile says: the next start measures again."""
        profile = self.ranks.profile
        _log.warning(
            "iterations are far shorter than the latency profile predicts: the machine was busy "
            "when it was measured, and the next start measures again"
        )
        mark_contradicted(cache_path_if_any(profile.identity), profile)

    def kill(self) -> None:
        """End the ranks at once, also if they hang."""
        self.ranks.executor.kill()

    def close(self) -> None:
        """Stop the ranks; idempotent."""
        self.ranks.executor.close()

    def _count_restart(self, error: FastServeError) -> None:
        number = self._limiter.take_restart(self._clock.now())
        if number is None:
            raise EngineError(
                f"the model's processes failed: {error}; given up after {self._limiter.describe()}"
            )
        _log.error(
            "%s; restarting the ranks (%d of at most %s); %d unfinished jobs go on after it",
            error,
            number,
            self._limiter.describe(),
            self._admission.num_unfinished,
        )
        self._counters.worker_restarts += 1

    def _start(self, executor: OwnedExecutor) -> StartedRanks:
        """Start the ranks, and measure their latency profile unless an earlier one fits them."""
        model = self._model
        setup = Setup.of(self._config, model.directory, model.eos_token_ids)
        ready = executor.start(setup, self._start_timeout_s)
        if ready.disk_error is not None:
            if self._profile is None:  # the first start: the operator can mend it now
                raise ConfigError(ready.disk_error)
            _log.warning("no KV is written to the disk: %s", ready.disk_error)
        measurable = ReadyRanks.of(model, self._config, ready, executor, self._clock.now)
        identity = measurable.identity
        if self._profile is None or self._profile.identity.key != identity.key:
            self._profile = load_or_measure(cache_path_if_any(identity), measurable)
        return StartedRanks(executor, ready, self._profile, self._model.layer_groups.kinds)


class RankReplacement:
    """Ends broken ranks and starts fresh ones, on a thread of its own: loading a model takes up to
    minutes, and the engine goes on taking requests meanwhile.

    Args:
        broken: ended before the fresh ranks start, which need its memory.
        make_executor: makes the fresh ranks.
        start: starts them.
    """

    def __init__(
        self,
        broken: OwnedExecutor,
        make_executor: Callable[[], OwnedExecutor],
        start: Callable[[OwnedExecutor], StartedRanks],
    ) -> None:
        self._broken = broken
        self._make_executor = make_executor
        self._start = start
        self._executor: OwnedExecutor | None = None
        self._is_abandoned = False
        self.future: Future[StartedRanks] = Future()
        """The fresh ranks, which the caller has to close. A FastServeError if they did not start;
        then nothing is left of them."""
        self._thread = threading.Thread(target=self._run, name="rank-start", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Give the start up, and end broken and fresh ranks at once."""
        self._is_abandoned = True
        while self._thread.is_alive():
            for executor in (self._broken, self._executor):
                if executor is not None:
                    executor.kill()
            self._thread.join(_ABANDON_POLL_S)
        if self.future.exception() is None:
            self.future.result().executor.close()

    def _run(self) -> None:
        try:
            fresh = self._replace()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(fresh)

    def _replace(self) -> StartedRanks:
        self._broken.kill()  # a stopped rank would not hear `close`, and the others wait for it
        self._broken.close()
        if self._is_abandoned:
            raise EngineError("the start of the ranks was given up")
        self._executor = self._make_executor()
        try:
            return self._start(self._executor)
        except BaseException:
            self._executor.close()
            raise
