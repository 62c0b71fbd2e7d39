"""The Grafana dashboard and its provisioning, as far as can be told without a Grafana."""

from __future__ import annotations

import itertools

import dashboard
import yaml
from metric_traffic import Traffic
from running_prometheus import CONFIG, DEPLOY, RULES

PROVISIONING = DEPLOY / "grafana" / "provisioning"
GATEWAY = "fastserve_gateway_"


def test_it_shows_every_metric_of_the_server_and_no_other(traffic: Traffic) -> None:
    # Names that end so are constants, whose labels describe the server.
    scraped = {
        name
        for name in traffic.after.names
        if name.startswith("fastserve_") and not name.endswith("_info")
    }
    asked = {
        name
        for query in dashboard.queries()
        for name in dashboard.METRIC.findall(query.expression)
        if not name.startswith(GATEWAY)
    }
    assert asked == scraped


def test_rules_ask_for_metrics_that_exist(traffic: Traffic) -> None:
    names = set(dashboard.METRIC.findall(RULES.read_text(encoding="utf-8")))
    assert names <= traffic.after.names
    assert names


def test_a_share_of_time_is_that_of_one_server() -> None:
    """The alert uses the same share. A sum over servers could pass 100%."""
    (stalls,) = (query for query in dashboard.queries() if query.panel == "Stalls")
    taken = "sum by (instance, model) (rate(fastserve_swap_stall_seconds_total"
    assert stalls.expression.startswith(taken)
    assert taken in RULES.read_text(encoding="utf-8")


def test_panels_have_places_of_their_own() -> None:
    everything = dashboard.load()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in everything}) == len(everything)
    places = [panel["gridPos"] for panel in everything]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above


def test_every_panel_asks_the_data_source_that_is_chosen() -> None:
    board = dashboard.load()
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for panel in dashboard.panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_provisioning_names_what_there_is() -> None:
    (source,) = yaml.safe_load(
        (PROVISIONING / "datasources" / "prometheus.yml").read_text(encoding="utf-8")
    )["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load(
        (PROVISIONING / "dashboards" / "fastserve.yml").read_text(encoding="utf-8")
    )["providers"]
    assert provider["type"] == "file"
    assert config["rule_files"] == [RULES.name]
