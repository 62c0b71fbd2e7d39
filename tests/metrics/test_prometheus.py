"""A real Prometheus scrapes server and gateway, and evaluates rules and dashboard."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import dashboard
import httpx2
import pytest
import yaml
from autoscalers import keda_queries, outside_cluster
from fastserve_backend.serving.launch import TritonServer
from metric_traffic import Traffic
from running_gateway import RunningGateway, running_gateway
from running_prometheus import RULES, RunningPrometheus, local_config, promtool, running_prometheus
from scrape import Scrape
from serving_client import generate
from waiting import wait_for

LATE = "context deadline exceeded"
KEY = "sk-of-the-metrics-0123456789"

ANSWERS_TIMEOUT_S = 120.0
# promtool checks names. Triton's own metrics break some of its rules, and so does a metric that is
# a histogram in all but its type (docs/metrics.md).
EXPECTED_PROBLEMS = re.compile(
    r"nv_\w+ (counter metrics should have \"_total\" suffix"
    r"|metric names should not contain abbreviated units"
    r"|non-histogram and non-summary metrics should not have \"_count\" suffix)"
    r"|fastserve_inter_token_seconds_\w+ (counter metrics should have \"_total\" suffix"
    r"|non-histogram metrics should not have \"(_bucket\" suffix|le\" label)"
    r"|non-histogram and non-summary metrics should not have \"(_sum|_count)\" suffix)"
)


@pytest.fixture(scope="module")
def gateway(
    server: TritonServer, traffic: Traffic, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway that starts after the traffic, as others must not send anything between its
    scrapes."""
    directory = tmp_path_factory.mktemp("gateway")
    keys = directory / "keys"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    with running_gateway(
        server.endpoints.grpc_url, directory / "gateway.log", "--api-keys-file", str(keys)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(
    server: TritonServer, gateway: RunningGateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningPrometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    key_path = directory / "key"
    key_path.write_text(KEY, encoding="utf-8")
    targets = {
        "triton": f"127.0.0.1:{server.endpoints.metrics_port}",
        "gateway": httpx2.URL(gateway.url).netloc.decode(),
    }
    with running_prometheus(local_config(directory, targets, key_path)) as running:
        wait_for(lambda: running.values("up") == [1.0, 1.0], ANSWERS_TIMEOUT_S)
        yield running


def request_each_way(server: TritonServer, gateway: RunningGateway) -> None:
    # Long enough that its length is predicted before it ends.
    generate(
        server.endpoints.grpc_url, text_input="a", max_tokens=150, ignore_eos=True, stream=True
    )
    with gateway.client(KEY) as client:
        client.completions.create(
            model="fastserve", prompt="b", max_tokens=4, extra_body={"ignore_eos": True}
        )


def test_every_query_of_the_dashboard_gives_numbers(
    prometheus: RunningPrometheus, server: TritonServer, gateway: RunningGateway
) -> None:
    waiting = dict.fromkeys(dashboard.queries(), "no answer yet")

    def all_answered() -> bool:
        request_each_way(server, gateway)
        for query in list(waiting):
            values = prometheus.values(query.expression)
            # Quantiles and means are NaN while nothing has happened.
            if values and all(math.isfinite(value) for value in values):
                del waiting[query]
        return not waiting

    wait_for(all_answered, ANSWERS_TIMEOUT_S)
    assert any("histogram_quantile" in query.expression for query in dashboard.queries())


def test_the_queries_of_autoscalers_give_one_number(
    prometheus: RunningPrometheus, server: TritonServer, gateway: RunningGateway
) -> None:
    request_each_way(server, gateway)
    for query in map(outside_cluster, keda_queries()):
        # A rate needs two scrapes, and a slow machine may miss one.
        wait_for(lambda query=query: len(prometheus.values(query)) == 1, ANSWERS_TIMEOUT_S)
        assert all(0 <= value < math.inf for value in prometheus.values(query))


def test_scrapes_leave_no_warning(prometheus: RunningPrometheus) -> None:
    number = "sum_over_time(up[1m])"
    wait_for(lambda: min(prometheus.values(number), default=0.0) >= 3, ANSWERS_TIMEOUT_S)

    def are_up() -> bool:
        targets = prometheus.get("targets")["activeTargets"]
        assert {target["labels"]["job"] for target in targets} == {"triton", "gateway"}
        return all((one["health"], one["lastError"]) == ("up", "") for one in targets)

    wait_for(are_up, ANSWERS_TIMEOUT_S)
    log = prometheus.log_path.read_text(encoding="utf-8")
    assert "Server is ready to receive web requests" in log
    # Prometheus logs a failed scrape at debug level.
    for problem in ("level=warn", "level=error", "Scrape failed", "Append failed"):
        # A busy machine may need longer than the two seconds between two scrapes.
        found = [line for line in log.splitlines() if problem in line and LATE not in line]
        assert not found


def test_every_sample_of_a_scrape_is_stored(
    prometheus: RunningPrometheus, server: TritonServer
) -> None:
    scrape = Scrape(server.endpoints.metrics_url)
    names = {name for name in scrape.names if name.startswith("fastserve_")}
    wait_for(lambda: names <= set(prometheus.get("label/__name__/values")), ANSWERS_TIMEOUT_S)
    samples = "scrape_samples_post_metric_relabeling", "scrape_samples_scraped"
    dropped = " - on (instance) ".join(f'{name}{{job="triton"}}' for name in samples)
    wait_for(lambda: prometheus.values(dropped) == [0.0], ANSWERS_TIMEOUT_S)


def test_rules_are_evaluated(prometheus: RunningPrometheus) -> None:
    def evaluated() -> bool:
        groups = prometheus.get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) == sum(
            len(group["rules"]) for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"]
        )
        assert not [rule for rule in rules if rule["health"] == "err"]
        return all(rule["health"] == "ok" for rule in rules)

    wait_for(evaluated, ANSWERS_TIMEOUT_S)
    # One that pends has missed a scrape.
    down = 'ALERTS{alertname=~"FastServe(Gateway)?Down", alertstate="firing"}'
    assert prometheus.values(down) == []


def test_promtool_finds_nothing_wrong_with_the_configuration(prometheus: RunningPrometheus) -> None:
    checked = promtool("check", "config", "--lint-fatal", str(prometheus.config_path))
    assert checked.returncode == 0, checked.stderr


def test_promtool_finds_nothing_wrong_with_our_metrics(traffic: Traffic) -> None:
    checked = promtool("check", "metrics", text=traffic.after.text)
    problems = checked.stderr.splitlines()
    assert [line for line in problems if not EXPECTED_PROBLEMS.fullmatch(line)] == []


def test_promtool_finds_nothing_wrong_with_the_gateways_metrics(gateway: RunningGateway) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    text = (
        httpx2.get(f"{gateway.url}/metrics", headers=headers, timeout=ANSWERS_TIMEOUT_S)
        .raise_for_status()
        .text
    )
    checked = promtool("check", "metrics", text=text)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_alerts_fire_when_they_should() -> None:
    tested = promtool("test", "rules", str(Path(__file__).with_name("alert_cases.yml")))
    assert tested.returncode == 0, tested.stdout + tested.stderr
