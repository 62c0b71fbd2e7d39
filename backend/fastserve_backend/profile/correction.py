"""Correct predicted iteration times while serving, because a machine's speed changes."""

from __future__ import annotations

import logging
import math

from fastserve_backend.profile.iteration import IterationLoad, LatencyModel

# Share of each observation in the running mean: 50 iterations at a new speed leave 8% of the error.
_WEIGHT = 0.05
# A process that the system paused makes one iteration look very slow. No observation counts as more
# than e times too slow, so each moves the predictions by 5% at most.
_MAX_LOG_ERROR = 1.0
# Beyond this factor the machine is not slow: its clock jumped, or it was suspended.
_MAX_LOG_RATIO = math.log(30.0)
# Smaller changes are not worth a new derivation of quanta and other values from the predictions.
_WORTH_REPORTING = math.log(1.15)
# A small model's iteration times drift several times a second when the machine has other work.
_DRIFT_LOG_INTERVAL_S = 60.0
_log = logging.getLogger(__name__)


class CorrectedLatency(LatencyModel):
    """Predictions of ``model``, times the recent ratio of real to predicted times.

    Iterations with and without prefill have ratios of their own: the first are bound by arithmetic,
    the others by memory.
    """

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self.num_stages = model.num_stages
        self._decode, self._prefill = _Ratio(), _Ratio()

    def replace(self, model: LatencyModel) -> None:
        """Predict by another machine's model, and forget the corrections of the old one."""
        self.model = model
        self.num_stages = model.num_stages
        self._decode, self._prefill = _Ratio(), _Ratio()

    @property
    def decode_ratio(self) -> float:
        """Real over predicted time of iterations without prefill."""
        return self._decode.value

    @property
    def prefill_ratio(self) -> float:
        """Real over predicted time of iterations with prefill."""
        return self._prefill.value

    def iteration_s(self, load: IterationLoad) -> float:
        return self._ratio(load).value * self.model.iteration_s(load)

    def score_s(self, num_tokens: int) -> float:
        return self._prefill.value * self.model.score_s(num_tokens)

    def observe(self, load: IterationLoad, elapsed_s: float) -> bool:
        """Learn that an iteration took ``elapsed_s``.

        Returns whether predictions have moved notably since this last returned True.
        """
        return self._ratio(load).observe(elapsed_s / self.model.iteration_s(load))

    def _ratio(self, load: IterationLoad) -> _Ratio:
        return self._decode if load.num_decodes == load.num_tokens else self._prefill


class DriftLog:
    """Logs how far the predictions of ``latency`` have moved, once a minute at most."""

    def __init__(self, latency: CorrectedLatency) -> None:
        self._latency = latency
        self._next_log_s = -math.inf

    def on_drift(self, now: float, num_seats: int) -> None:
        """Predictions have moved notably, and an iteration has at most ``num_seats`` jobs now."""
        if now < self._next_log_s:
            return
        self._next_log_s = now + _DRIFT_LOG_INTERVAL_S
        _log.info(
            "iterations take %.2f (decode) and %.2f (with prefill) times the profile's prediction, "
            "and have at most %d job%s",
            self._latency.decode_ratio,
            self._latency.prefill_ratio,
            num_seats,
            "" if num_seats == 1 else "s",
        )


class _Ratio:
    """A running geometric mean, in which single values have little weight.

    It averages logarithms, so that twice as fast weighs as much as twice as slow.
    """

    __slots__ = ("_log", "_reported_log", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self._log = self._reported_log = 0.0

    def observe(self, ratio: float) -> bool:
        """Whether the mean has moved notably since this last returned True."""
        error = math.log(ratio) - self._log if ratio > 0 else -_MAX_LOG_ERROR
        error = max(-_MAX_LOG_ERROR, min(_MAX_LOG_ERROR, error))
        self._log += _WEIGHT * error
        self._log = max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, self._log))
        self.value = math.exp(self._log)
        if abs(self._log - self._reported_log) < _WORTH_REPORTING:
            return False
        self._reported_log = self._log
        return True
