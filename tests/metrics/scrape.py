"""One scrape of the server's metrics port, parsed as Prometheus' own Python library does."""

from __future__ import annotations

from dataclasses import dataclass

import httpx2
from fastserve_client.protocol import MODEL_NAME
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 30.0
LABELS = {"model": MODEL_NAME, "version": "1"}


@dataclass(frozen=True)
class Buckets:
    """A histogram: its cumulative buckets by upper bound, ascending, the last one infinite."""

    cumulative: dict[float, float]
    sum: float
    count: float

    def __sub__(self, before: Buckets) -> Buckets:
        difference = {
            bound: number - before.cumulative[bound] for bound, number in self.cumulative.items()
        }
        return Buckets(difference, self.sum - before.sum, self.count - before.count)


class Scrape:
    """The samples of one moment."""

    def __init__(self, metrics_url: str) -> None:
        response = httpx2.get(metrics_url, timeout=TIMEOUT_S).raise_for_status()
        self.text = response.text
        self.types: dict[str, str] = {}
        self._samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(self.text):
            self.types[family.name] = family.type
            for sample in family.samples:
                name = sample.name
                # The library appends this to the names of counters.
                if family.type == "counter" and f"{family.name} counter" in self.text:
                    name = name.removesuffix("_total")
                self._samples[name, frozenset(sample.labels.items())] = sample.value

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._samples}

    def value(self, name: str, **labels: str) -> float:
        return self._samples[name, frozenset((LABELS | labels).items())]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples with these labels; 0 if none is published yet."""
        wanted = frozenset(labels.items())
        return sum(
            value for (of, have), value in self._samples.items() if of == name and wanted <= have
        )

    def label_values(self, name: str, label: str) -> set[str]:
        return {dict(labels)[label] for of, labels in self._samples if of == name}

    def histogram(self, name: str) -> Buckets:
        buckets = {
            float(dict(labels)["le"]): value
            for (of, labels), value in self._samples.items()
            if of == f"{name}_bucket"
        }
        return Buckets(
            dict(sorted(buckets.items())), self.value(f"{name}_sum"), self.value(f"{name}_count")
        )
