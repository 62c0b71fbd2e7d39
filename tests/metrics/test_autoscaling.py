"""What clusters read of the server: autoscalers its queue, endpoint pickers its load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from autoscalers import DIRECTORY, adapter_queries, keda_queries
from metric_traffic import BLOCK_SIZE, DEVICE_BLOCKS, Traffic
from running_prometheus import promtool

ROUTER_VALUES = (
    Path(__file__).parents[2] / "deploy" / "kubernetes" / "inference_gateway" / "router_values.yaml"
)
JOBS = 'fastserve_jobs{namespace="fastserve", pod="triton-%d", state="%s"}'
KV_USE = 'fastserve_kv_usage_ratio{namespace="fastserve", pod="triton-%d"}'
ENDED = 'fastserve_requests_total{namespace="fastserve", pod="triton-0", finish_reason="%s"}'


def test_both_autoscalers_ask_the_same_and_want_the_same() -> None:
    assert keda_queries() == adapter_queries()
    keda, hpa, adapter = (
        yaml.safe_load((DIRECTORY / name).read_text(encoding="utf-8"))
        for name in ("keda.yaml", "hpa.yaml", "prometheus_adapter_values.yaml")
    )
    triggers, metrics = keda["spec"]["triggers"], hpa["spec"]["metrics"]
    names = [rule["name"]["as"] for rule in adapter["rules"]["external"]]
    assert [metric["external"]["metric"]["name"] for metric in metrics] == names
    for trigger, metric in zip(triggers, metrics, strict=True):
        target = dict(metric["external"]["target"])
        assert target.pop("type") == trigger["metricType"]
        (quantity,) = target.values()
        wanted = float(trigger["metadata"]["threshold"])
        assert quantity in (f"{wanted:g}", f"{1000 * wanted:g}m")
    behavior = keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == hpa["spec"]["behavior"]


@pytest.mark.parametrize(
    ("series", "values"),
    [
        # 24 waiting and 16 swapped jobs at 4 jobs a second: 10 s until a new job's turn.
        (
            {
                JOBS % (0, "waiting"): "20x40",
                JOBS % (1, "waiting"): "4x40",
                JOBS % (0, "swapped"): "16x40",
                JOBS % (0, "running"): "12x40",
                JOBS % (1, "running"): "16x40",
                ENDED % "stop": "0+15x40",
                ENDED % "length": "0+5x40",
                KV_USE % 0: "1x40",
                KV_USE % 1: "0.25x40",
            },
            (10, 28, 1.25),
        ),
        # Nobody waits.
        (
            {
                JOBS % (0, "waiting"): "0x40",
                JOBS % (0, "running"): "3x40",
                ENDED % "stop": "7x40",
                KV_USE % 0: "0x40",
            },
            (0, 3, 0),
        ),
        # Jobs came to an idle server: none has ended yet. A job in 50 s is taken for granted.
        (
            {
                JOBS % (0, "waiting"): "0x24 2x16",
                JOBS % (0, "running"): "0x24 1x16",
                ENDED % "stop": "7x40",
                KV_USE % 0: "0.5x40",
            },
            (100, 1, 0.5),
        ),
    ],
)
def test_the_queries_say_how_long_the_queue_is_and_how_full_the_servers_are(
    series: dict[str, str], values: tuple[float, ...], tmp_path: Path
) -> None:
    checks = [
        {
            # Compared so, because quotients of rates are rounded.
            "expr": f"abs({query} - {value}) < bool 1e-6",
            "eval_time": "195s",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for query, value in zip(keda_queries(), values, strict=True)
    ]
    inputs = [{"series": name, "values": points} for name, points in series.items()]
    case = {"interval": "5s", "input_series": inputs, "promql_expr_test": checks}
    path = tmp_path / "queries.yml"
    path.write_text(
        yaml.safe_dump({"evaluation_interval": "5s", "tests": [case]}), encoding="utf-8"
    )
    tested = promtool("test", "rules", str(path))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def extractor() -> dict[str, Any]:
    """The names under which llm-d's endpoint picker looks for a server's load."""
    values = yaml.safe_load(ROUTER_VALUES.read_text(encoding="utf-8"))
    config = yaml.safe_load(values["router"]["epp"]["pluginsCustomConfig"]["fastserve.yaml"])
    (plugin,) = (one for one in config["plugins"] if one["type"] == "core-metrics-extractor")
    (engine,) = plugin["parameters"]["engineConfigs"]
    assert engine["name"] == plugin["parameters"]["defaultEngine"]
    return engine


def test_an_endpoint_picker_finds_the_load_of_a_server(traffic: Traffic) -> None:
    engine = extractor()

    def value(specification: str) -> float:
        name, _, labels = engine[specification].partition("{")
        assert traffic.during.types[name] == "gauge"
        return traffic.during.value(name, **dict(re.findall(r'(\w+)="(\w+)"', labels)))

    assert value("queuedRequestsSpec") > 0
    assert value("runningRequestsSpec") > 0
    assert 0 < value("kvUsageSpec") <= 1
    assert traffic.during.label_values(engine["cacheInfoSpec"], "block_size") == {str(BLOCK_SIZE)}
    assert traffic.during.label_values(engine["cacheInfoSpec"], "num_gpu_blocks") == {
        str(DEVICE_BLOCKS)
    }
