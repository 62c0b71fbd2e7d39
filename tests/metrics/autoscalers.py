"""The queries by which ``deploy/kubernetes/autoscaled`` chooses the number of servers."""

from __future__ import annotations

from pathlib import Path

import yaml

DIRECTORY = Path(__file__).parents[2] / "deploy" / "kubernetes" / "autoscaled"
_NAMESPACE = 'namespace="fastserve"'


def keda_queries() -> list[str]:
    """Of queue seconds, running jobs and the KV cache's use."""
    scaled = yaml.safe_load((DIRECTORY / "keda.yaml").read_text(encoding="utf-8"))
    return [_plain(trigger["metadata"]["query"]) for trigger in scaled["spec"]["triggers"]]


def adapter_queries() -> list[str]:
    """The same ones, as the Prometheus adapter asks them for an autoscaler of Kubernetes' own."""
    path = DIRECTORY / "prometheus_adapter_values.yaml"
    rules = yaml.safe_load(path.read_text(encoding="utf-8"))["rules"]["external"]
    return [
        _plain(rule["metricsQuery"].replace("<<.LabelMatchers>>", _NAMESPACE)) for rule in rules
    ]


def outside_cluster(query: str) -> str:
    """The query for metrics without the label that Kubernetes adds."""
    assert _NAMESPACE in query
    return query.replace(f"{_NAMESPACE}, ", "").replace(_NAMESPACE, "")


def _plain(query: str) -> str:
    return " ".join(query.split())
