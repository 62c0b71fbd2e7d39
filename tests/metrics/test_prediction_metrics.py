"""The metrics of length prediction match the clients' answers, and no prompt is in a log."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend.serving.launch import TritonServer
from metric_traffic import Traffic, scrape_when
from running_server import rank_stopped
from scrape import Scrape
from serving_client import GrpcStream, generate, settle
from waiting import PREDICTOR_LOAD_S, wait_for

OUTPUT_TOKENS = 150
REASONS = {"cold", "down", "slow"}
# Words that appear nowhere else.
WORDS = ("xylophone", "quicksilver", "marmalade")
PROMPT = f"Write a poem about {', '.join(WORDS)}."


def all_counted(scrape: Scrape) -> bool:
    """Whether every ended job was predicted or fell back."""
    counted = scrape.total("fastserve_predictions_total")
    counted += scrape.total("fastserve_prediction_fallbacks_total")
    return counted == scrape.total("fastserve_requests_total")


def at_rest(server: TritonServer) -> Scrape:
    return scrape_when(
        server.endpoints.metrics_url,
        lambda now: (
            now.total("fastserve_jobs") == 0
            and all_counted(now)
            and now.value("fastserve_prediction_seconds_count")
            == now.total("fastserve_predictions_total")
        ),
    )


@pytest.fixture(scope="module")
def taught(server: TritonServer, traffic: Traffic) -> Scrape:
    """A scrape after the predictor has learned from the traffic. The prompts are random tokens
    without words, which the encoder may not tell apart."""
    return scrape_when(
        server.endpoints.metrics_url,
        lambda now: now.value("fastserve_prediction_index_entries") >= 1,
    )


def test_every_job_is_counted_once(server: TritonServer, taught: Scrape) -> None:
    scrape = at_rest(server)
    sources = scrape.label_values("fastserve_predictions_total", "source")
    assert sources == {"neighbours", "regressor"}
    assert scrape.label_values("fastserve_prediction_fallbacks_total", "reason") == REASONS
    # Nothing was known at first.
    assert scrape.total("fastserve_prediction_fallbacks_total") > 0


def test_a_predicted_job_is_compared_with_what_its_client_got(
    server: TritonServer, taught: Scrape
) -> None:
    scrapes = [at_rest(server)]
    latencies: list[float] = []

    def grown(name: str, **labels: str) -> float:
        return scrapes[-1].value(name, **labels) - scrapes[-2].value(name, **labels)

    def predicted() -> bool:
        flags = {"stream": True, "ignore_eos": True, "return_perf_metrics": True}
        url = server.endpoints.grpc_url
        with rank_stopped(server.runtime):  # so the job cannot end before it is predicted
            stream = GrpcStream(url, text_input=PROMPT, max_tokens=OUTPUT_TOKENS, **flags)
            settle(server.endpoints)  # a second, in which the predictor answers
        answer = stream.finish()
        assert len(answer.token_ids) == OUTPUT_TOKENS
        arrival, last = (answer.outputs[f"{of}_time_ns"] for of in ("arrival", "last_token"))
        latencies.append((last - arrival) / 1e9)
        scrapes.append(at_rest(server))
        return scrapes[-1].total("fastserve_predictions_total") > scrapes[-2].total(
            "fastserve_predictions_total"
        )

    wait_for(predicted, PREDICTOR_LOAD_S)
    # This value is published last.
    errors_before = scrapes[-2].value("fastserve_prediction_error_ratio_count")
    scrapes[-1] = scrape_when(
        server.endpoints.metrics_url,
        lambda now: now.value("fastserve_prediction_error_ratio_count") > errors_before,
    )
    assert grown("fastserve_prediction_tokens_total", length="real") == OUTPUT_TOKENS
    number = grown("fastserve_prediction_tokens_total", length="predicted")
    assert number > 0
    assert grown("fastserve_prediction_error_ratio_count") == 1
    error = abs(number - OUTPUT_TOKENS) / OUTPUT_TOKENS
    assert grown("fastserve_prediction_error_ratio_sum") == pytest.approx(error, abs=1e-6)
    assert 0 < grown("fastserve_prediction_seconds_sum") <= latencies[-1]


def test_no_word_of_a_prompt_is_in_the_log(
    server: TritonServer, taught: Scrape, log_path: Path
) -> None:
    generate(server.endpoints.grpc_url, text_input=PROMPT, max_tokens=2, stream=True)
    log = log_path.read_text(encoding="utf-8", errors="replace")
    assert "the length predictor is ready" in log
    assert not [word for word in WORDS if word in log]
