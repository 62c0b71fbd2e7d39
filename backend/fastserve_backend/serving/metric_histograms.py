"""Histograms on Triton's metrics port: Triton's own kind, or counters with the same names.

Triton's histogram takes one value a call, and a call costs as much as for any other metric. That
suits values that occur once a request. The time between tokens would need a call for each token. So
it is published as counters with the names and labels that a histogram has on the wire:
``NAME_bucket{le}``, ``NAME_sum`` and ``NAME_count``. Their number of calls does not depend on the
load. PromQL treats both alike; only the ``# TYPE`` lines differ. docs/metrics.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from fastserve_backend.metrics.latency_histograms import Histogram, Observations

Call = Callable[[], object]
"""Sends one change to the server."""


class PublishedHistogram(Protocol):
    def changes(self, taken: Observations) -> list[Call]:
        """The calls that publish these new observations, in their order."""
        ...


def publish_histogram(
    name: str, description: str, labels: dict[str, str], histogram: Histogram, *, per_token: bool
) -> PublishedHistogram:
    """Register the histogram with the server; all its values are zero.

    Args:
        per_token: the histogram has a value for each token, too many for a call each.
    """
    # Releases before python_backend's pull request 374 (August 2024) know no histograms.
    if per_token or not hasattr(pb_utils.MetricFamily, "HISTOGRAM"):
        return _CounterHistogram(name, description, labels, histogram.bounds)
    return _TritonHistogram(name, description, labels, histogram.bounds)


class _TritonHistogram:
    """A call for each observation.

    For each value it sends the mean of the value's bucket, because only the bucket's count and sum
    are known. The published buckets, count and sum are exact.
    """

    def __init__(
        self, name: str, description: str, labels: dict[str, str], bounds: tuple[float, ...]
    ) -> None:
        self._family = pb_utils.MetricFamily(
            name=name, description=description, kind=pb_utils.MetricFamily.HISTOGRAM
        )
        self._metric = self._family.Metric(labels=labels, buckets=list(bounds))
        self._edges = (-math.inf, *bounds, math.inf)

    def changes(self, taken: Observations) -> list[Call]:
        calls: list[Call] = []
        for bucket, (count, total) in enumerate(zip(taken.counts, taken.sums, strict=True)):
            if count:
                # Rounding must not move a mean at a bound across the bound.
                least = math.nextafter(self._edges[bucket], math.inf)
                mean = max(least, min(self._edges[bucket + 1], total / count))
                calls += [partial(self._metric.observe, mean)] * count
        return calls


class _CounterHistogram:
    """A call for each counter that changes, for any number of observations."""

    def __init__(
        self, name: str, description: str, labels: dict[str, str], bounds: tuple[float, ...]
    ) -> None:
        def family(suffix: str, what: str) -> Any:
            return pb_utils.MetricFamily(
                name=name + suffix,
                description=f"{description}: {what}",
                kind=pb_utils.MetricFamily.COUNTER,
            )

        # Metrics do not keep their families alive.
        self._families = [
            family("_bucket", "values up to le"),
            family("_sum", "sum of the values"),
            family("_count", "number of values"),
        ]
        buckets, total, count = self._families
        self._buckets = [
            buckets.Metric(labels=labels | {"le": bound})
            for bound in (*(f"{bound:.12g}" for bound in bounds), "+Inf")
        ]
        self._sum = total.Metric(labels=labels)
        self._count = count.Metric(labels=labels)

    def changes(self, taken: Observations) -> list[Call]:
        number = sum(taken.counts)
        if number == 0:
            return []
        calls: list[Call] = [
            partial(self._count.increment, number),
            partial(self._sum.increment, sum(taken.sums)),
        ]
        # The last bucket first, so that a scrape between two calls still finds ascending buckets.
        for metric, count in zip(reversed(self._buckets), reversed(taken.counts), strict=True):
            if number:
                calls.append(partial(metric.increment, number))
            number -= count
        return calls
