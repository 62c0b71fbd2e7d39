"""The Grafana dashboard of ``deploy/``, read from its JSON."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from running_prometheus import DEPLOY

PATH = DEPLOY / "grafana" / "dashboards" / "fastserve.json"
# Values of Grafana's variables, for a test of half a minute.
VARIABLES = {"$__rate_interval": "30s", "$__range": "30s", "$model": ".*", "$slo": "0.3"}
METRIC = re.compile(r"fastserve_\w+")


class Query(NamedTuple):
    panel: str
    expression: str


def load() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return dashboard


def panels() -> list[dict[str, Any]]:
    """All panels, without the headings of rows."""
    return [panel for panel in load()["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    """Every expression, with values for Grafana's variables."""
    found = []
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, expression
            found.append(Query(panel["title"], expression))
    return found
