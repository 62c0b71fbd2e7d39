"""Predictions of output lengths, with the errors of a real predictor."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastserve_bench.workload import Lengths, TraceJob
from numpy.typing import NDArray

MEASURED = Path(__file__).parents[1] / "length_prediction" / "prediction_errors.csv"
"""Errors of this project's predictor on real answers that it had not learned."""

_NEAREST = 0.05  # an error is drawn from this share of the held-out jobs


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """Errors of held-out jobs, given to the jobs of any data set.

    A predictor tends to the middle of the lengths that it knows: it over-predicts short outputs and
    under-predicts long ones. So a job gets the error of a held-out job whose output has about the
    same rank in its data set. The error is a distance in ranks, because a predictor errs by a
    smaller factor where lengths differ less.
    """

    jobs: tuple[tuple[int, int], ...]
    """(real, predicted) tokens, by real length, shortest first."""

    @classmethod
    def read(cls, path: Path) -> PredictionErrors:
        """From a CSV with the columns ``real_tokens`` and ``predicted_tokens``."""
        with path.open(newline="", encoding="utf-8") as file:
            jobs = [
                (int(row["real_tokens"]), int(row["predicted_tokens"]))
                for row in csv.DictReader(file)
            ]
        return cls(tuple(sorted(jobs, key=lambda job: job[0])))

    def predict(
        self, trace: Sequence[TraceJob], lengths: Lengths, seed: int, max_model_len: int
    ) -> list[int]:
        """A prediction for each job of a trace that was drawn from ``lengths``.

        A longer trace begins with the predictions of a shorter one. No prediction exceeds the
        model's length.
        """
        ordered = np.sort([output for _, output in lengths])
        outputs = np.array([job.output_tokens for job in trace])
        among_equals, among_nearest = (
            np.random.default_rng((seed, len(self.jobs))).random((len(trace), 2)).T
        )
        below, up_to = _ranks(ordered, outputs)
        ranks = below + among_equals * (up_to - below)
        # The window stays inside: at the ends, neighbours are on one side only.
        begins = np.clip(ranks - _NEAREST / 2, 0, 1 - _NEAREST)
        drawn = ((begins + among_nearest * _NEAREST) * len(self.jobs)).astype(int)
        real, predicted = np.array(self.jobs).T
        errors = np.mean(_ranks(real, predicted), axis=0) - np.mean(_ranks(real, real), axis=0)
        places = np.clip((ranks + errors[drawn]) * len(ordered), 0, len(ordered) - 1).astype(int)
        longest = [max_model_len - job.prompt_tokens for job in trace]
        return [int(tokens) for tokens in np.minimum(ordered[places], longest)]


def _ranks(ordered: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """For each value, the shares of the ordered values that are less, and that are at most as
    large."""
    below, up_to = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return below / len(ordered), up_to / len(ordered)


PERFECT = PredictionErrors(((1, 1),))
"""Predictions that equal the real lengths."""
