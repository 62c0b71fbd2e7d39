"""Metrics of length prediction. They exist only if lengths are predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from fastserve_backend.length_prediction.job_predictions import JobPredictions
from fastserve_backend.length_prediction.messages import FallbackReason, PredictionSource
from fastserve_backend.metrics.latency_histograms import Histogram

DESCRIPTIONS = {
    "fastserve_prediction_index_entries": "Prompts that the length predictor remembers",
    "fastserve_predictions_total": "Jobs whose output length was predicted, by how",
    "fastserve_prediction_fallbacks_total": "Jobs that ended without a prediction, by reason",
    "fastserve_prediction_tokens_total": (
        "Output tokens, predicted and real, of predicted jobs that ended by themselves"
    ),
}


def histograms(predictions: JobPredictions) -> Iterator[tuple[str, str, Histogram]]:
    """Name, description and values of each histogram."""
    counters = predictions.counters
    yield (
        "fastserve_prediction_seconds",
        "Time from a job's arrival until the policy has its predicted length",
        counters.latency,
    )
    yield (
        "fastserve_prediction_error_ratio",
        "Difference of predicted and real output tokens by the real ones",
        counters.relative_error,
    )


def samples(predictions: JobPredictions) -> Iterator[tuple[str, dict[str, str], float]]:
    """Family, labels and value of each gauge and counter."""
    counters = predictions.counters
    yield "fastserve_prediction_index_entries", {}, predictions.num_entries
    for source in get_args(PredictionSource):
        number = counters.predictions[source]
        yield "fastserve_predictions_total", {"source": source}, number
    for reason in get_args(FallbackReason):
        number = counters.fallbacks[reason]
        yield "fastserve_prediction_fallbacks_total", {"reason": reason}, number
    for length, tokens in (
        ("predicted", counters.predicted_tokens),
        ("real", counters.real_tokens),
    ):
        yield "fastserve_prediction_tokens_total", {"length": length}, tokens
