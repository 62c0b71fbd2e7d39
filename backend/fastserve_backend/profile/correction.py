"""Correct predicted iteration times while serving: the machine is not always as it was measured."""

from __future__ import annotations

import math

from fastserve_backend.profile.iteration import IterationLoad, LatencyModel

# Share of each observation in the running mean: 50 iterations at a new speed leave 8% of the error.
_WEIGHT = 0.05
# An iteration whose process was descheduled says nothing; it counts as e times too slow, no more,
# and so moves the predictions by 5%.
_MAX_LOG_ERROR = 1.0
# Beyond this factor it is not the machine that is slow: its clock jumped, or it was suspended.
_MAX_LOG_RATIO = math.log(30.0)
# What is derived from predictions, such as quanta, need not follow each small change.
_WORTH_REPORTING = math.log(1.15)


class CorrectedLatency(LatencyModel):
    """Predictions of ``model`` times what iterations really take of them, lately.

    Decode-only iterations are bound by memory, those with prefills by arithmetic, so the two have
    ratios of their own.
    """

    def __init__(self, model: LatencyModel) -> None:
        self.replace(model)

    def replace(self, model: LatencyModel) -> None:
        """Predict by another model, of another machine: what was learned of the old one goes."""
        self.model = model
        self.num_stages = model.num_stages
        self._decode, self._prefill = _Ratio(), _Ratio()

    @property
    def decode_ratio(self) -> float:
        """What iterations without prefill take, over what ``model`` predicts."""
        return self._decode.value

    @property
    def prefill_ratio(self) -> float:
        """The same of iterations with prefill."""
        return self._prefill.value

    def iteration_s(self, load: IterationLoad) -> float:
        return self._ratio(load).value * self.model.iteration_s(load)

    def observe(self, load: IterationLoad, elapsed_s: float) -> bool:
        """An iteration took ``elapsed_s``. Whether predictions have moved notably since last True.

        Averages logarithms, so that twice as fast weighs as much as twice as slow.
        """
        return self._ratio(load).observe(elapsed_s / self.model.iteration_s(load))

    def _ratio(self, load: IterationLoad) -> _Ratio:
        return self._decode if load.num_decodes == load.num_tokens else self._prefill


class _Ratio:
    """A running geometric mean of which single values move little."""

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
