"""Predictions of output lengths, as wrong as a real predictor was."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from fastserve_client.workload import Lengths, TraceJob

MEASURED = Path(__file__).parents[1] / "length_prediction" / "prediction_errors.csv"
"""Of this project's predictor, on real answers that it had not learned from."""

_NEAREST = 0.05  # share of the held-out jobs that one error is drawn from


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """Errors of held-out jobs, to be given to other jobs.

    Errors depend on the length: a predictor's guesses are drawn to the middle, so it over-predicts
    short outputs and under-predicts long ones. A job therefore gets the error of a held-out job
    whose output has about the same rank among theirs as the job's has in its own data set.
    """

    logs: tuple[float, ...]
    """ln(predicted / real), by real length, shortest first."""
    scale: float = 1.0
    """The logarithms times this: 0 is perfect foresight, 2 squares every ratio."""

    @classmethod
    def read(cls, path: Path) -> PredictionErrors:
        """From a CSV with the columns ``real_tokens`` and ``predicted_tokens``."""
        with path.open(newline="", encoding="utf-8") as file:
            pairs = [
                (int(row["real_tokens"]), int(row["predicted_tokens"]))
                for row in csv.DictReader(file)
            ]
        pairs.sort(key=lambda pair: pair[0])
        return cls(tuple(math.log(predicted / real) for real, predicted in pairs))

    def scaled(self, scale: float) -> PredictionErrors:
        return replace(self, scale=scale)

    def factor(self, share: float) -> float:
        """Within which this share of the predictions lies, above or below."""
        return float(np.exp(self.scale * np.quantile(np.abs(self.logs), share)))

    def predict(
        self, trace: Sequence[TraceJob], lengths: Lengths, seed: int, max_model_len: int
    ) -> list[int]:
        """A prediction for each job of a trace that was drawn from ``lengths``.

        The same seed draws the same errors whatever the scale, and a longer trace begins with the
        predictions of a shorter one. No prediction exceeds what the model has room for.
        """
        ranked = np.sort([output for _, output in lengths])
        outputs = np.array([job.output_tokens for job in trace])
        among_equals, among_nearest = (
            np.random.default_rng((seed, len(self.logs))).random((len(trace), 2)).T
        )
        first, after_last = (np.searchsorted(ranked, outputs, side) for side in ("left", "right"))
        quantiles = (first + among_equals * (after_last - first)) / len(ranked)
        # A window that stays inside: the ends have neighbours on one side only.
        begins = np.clip(quantiles - _NEAREST / 2, 0, 1 - _NEAREST)
        places = (begins + among_nearest * _NEAREST) * len(self.logs)
        ratios = np.exp(self.scale * np.array(self.logs)[places.astype(int)])
        longest = [max_model_len - job.prompt_tokens for job in trace]
        predictions: list[int] = np.clip(np.rint(outputs * ratios), 1, longest).astype(int).tolist()
        return predictions


PERFECT = PredictionErrors((0.0,))
"""The lengths themselves."""
