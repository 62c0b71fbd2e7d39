"""Every metric of the server, compared with what its clients counted."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import protocol
from metric_traffic import (
    BLOCK_SIZE,
    CANCELLED_TOKENS,
    DEVICE_BLOCKS,
    FIRST_TURN_TOKENS,
    MAX_NUM_SEQS,
    PROMPT_TOKENS,
    TENANT,
    Traffic,
    scrape_when,
)
from running_server import rank_pid
from scrape import Buckets, Scrape
from serving_client import Answer, settle
from tiny_model import TINY_OPT

HISTOGRAMS = (
    "fastserve_time_to_first_token_seconds",
    "fastserve_inter_token_seconds",
    "fastserve_e2e_seconds",
    "fastserve_queue_seconds",
    "fastserve_normalized_latency_seconds",
)
# Bytes of K and V of a block in float32; hidden_size covers all heads.
BLOCK_BYTES = TINY_OPT["num_hidden_layers"] * 2 * TINY_OPT["hidden_size"] * BLOCK_SIZE * 4
# The server reports whole nanoseconds, the engine floats of seconds.
TOLERANCE_S = 1e-6


def e2e_s(answer: Answer) -> float:
    outputs = answer.outputs
    return (outputs[protocol.LAST_TOKEN_TIME_NS] - outputs[protocol.ARRIVAL_TIME_NS]) / 1e9


def ttft_s(answer: Answer) -> float:
    outputs = answer.outputs
    return (outputs[protocol.FIRST_TOKEN_TIME_NS] - outputs[protocol.ARRIVAL_TIME_NS]) / 1e9


def first_wait_s(answer: Answer) -> float:
    outputs = answer.outputs
    return (outputs[protocol.FIRST_SCHEDULED_TIME_NS] - outputs[protocol.ARRIVAL_TIME_NS]) / 1e9


def grown(traffic: Traffic, name: str) -> Buckets:
    return traffic.after.histogram(name) - traffic.before.histogram(name)


def test_requests_are_counted_by_finish_reason(traffic: Traffic) -> None:
    assert {answer.outputs[protocol.FINISH_REASON] for answer in traffic.lengths} == {b"length"}
    assert {answer.outputs[protocol.FINISH_REASON] for answer in traffic.stops} == {b"stop"}
    counted = {
        reason: traffic.grown("fastserve_requests_total", finish_reason=reason)
        for reason in traffic.after.label_values("fastserve_requests_total", "finish_reason")
    }
    assert counted == {
        "length": len(traffic.lengths),
        "stop": len(traffic.stops),
        "cancelled": len(traffic.cancelled),
        "error": 0,
    }
    assert traffic.grown("fastserve_requests_rejected_total") == traffic.num_rejected


def test_tokens_are_counted(traffic: Traffic) -> None:
    assert traffic.grown("fastserve_prompt_tokens_total") == traffic.prompt_tokens
    generated = traffic.grown("fastserve_generation_tokens_total")
    received = sum(len(answer.token_ids) for answer in traffic.completed)
    cut_off = sum(len(answer.token_ids) for answer in traffic.cancelled)
    # Cancelled jobs may have made more tokens than clients got, but never all.
    assert received + cut_off <= generated < received + CANCELLED_TOKENS * len(traffic.cancelled)
    iterations = traffic.grown("fastserve_iterations_total")
    assert generated / MAX_NUM_SEQS <= iterations <= generated
    # One prompt was sent again after its first answer.
    full_blocks = PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert full_blocks <= traffic.grown("fastserve_prefix_cached_tokens_total")


def test_tokens_are_counted_for_their_tenants(traffic: Traffic) -> None:
    name = "fastserve_tenant_tokens_total"
    assert traffic.after.label_values(name, "tenant") == {"", TENANT}
    assert traffic.after.value(name, tenant=TENANT) == 3 + 1
    assert traffic.after.total(name) == sum(
        traffic.after.value(f"fastserve_{kind}_tokens_total") for kind in ("prompt", "generation")
    )


def test_tokens_of_sessions_are_counted_by_whether_their_kv_was_held(traffic: Traffic) -> None:
    name = "fastserve_session_tokens_total"
    assert traffic.grown(name, kv="held") == FIRST_TURN_TOKENS
    assert traffic.grown(name, kv="missing") == FIRST_TURN_TOKENS + 2
    assert traffic.after.value("fastserve_sessions_held") == 1
    blocks = -(-(FIRST_TURN_TOKENS + 2) // BLOCK_SIZE)
    assert traffic.after.value("fastserve_session_blocks", tier="device") == blocks


def test_completed_jobs_keep_or_miss_the_servers_objectives(traffic: Traffic) -> None:
    num_jobs = len(traffic.completed)
    # A job with one token has no time between tokens.
    num_longer = sum(len(answer.token_ids) > 1 for answer in traffic.completed)
    assert num_longer < num_jobs
    for objective, attained, missed in (("ttft", 0, num_jobs), ("tpot", num_longer, 0)):
        assert traffic.grown("fastserve_slo_attained_total", objective=objective) == attained
        assert traffic.grown("fastserve_slo_missed_total", objective=objective) == missed


def test_jobs_are_preempted_demoted_and_promoted(traffic: Traffic) -> None:
    preemptions = sum(answer.outputs[protocol.NUM_PREEMPTIONS] for answer in traffic.completed)
    assert 0 < preemptions <= traffic.grown("fastserve_preemptions_total")
    # A job below the highest queue was demoted or joined below it.
    num_jobs = len(traffic.completed) + len(traffic.cancelled)
    demotions = traffic.grown("fastserve_demotions_total")
    assert 0 < traffic.grown("fastserve_promotions_total") <= demotions + num_jobs
    assert demotions > 0


def test_swapped_bytes_are_whole_blocks(traffic: Traffic) -> None:
    swapped_out = traffic.grown("fastserve_swap_bytes_total", direction="out")
    swapped_in = traffic.grown("fastserve_swap_bytes_total", direction="in")
    avoided = traffic.grown("fastserve_swap_bytes_avoided_total")
    assert sum(answer.outputs[protocol.NUM_SWAPS] for answer in traffic.completed) > 0
    assert swapped_out > 0
    assert swapped_in > 0
    assert [number % BLOCK_BYTES for number in (swapped_out, swapped_in, avoided)] == [0, 0, 0]
    longest_s = max(e2e_s(answer) for answer in traffic.completed)
    assert 0 < traffic.grown("fastserve_swap_stall_seconds_total") < longest_s


def test_gauges_show_the_load_and_return_to_idle(traffic: Traffic) -> None:
    during = traffic.during
    assert during.value("fastserve_jobs", state="running") <= MAX_NUM_SEQS
    assert during.total("fastserve_jobs") <= len(traffic.lengths)
    for scrape in (traffic.before, traffic.after):
        assert scrape.label_values("fastserve_jobs", "state") == {"running", "waiting", "swapped"}
        assert scrape.total("fastserve_jobs") == 0
        assert scrape.total("fastserve_queue_jobs") == 0
        assert scrape.total("fastserve_priority_jobs") == 0
        for tier, blocks in (("device", DEVICE_BLOCKS), ("host", None)):
            free = scrape.value("fastserve_kv_blocks", tier=tier, state="free")
            assert scrape.value("fastserve_kv_blocks", tier=tier, state="used") == 0
            assert free == blocks or (blocks is None and free > DEVICE_BLOCKS)
        assert scrape.value("fastserve_kv_usage_ratio") == 0
    assert traffic.before.total("fastserve_kv_blocks") == traffic.after.total("fastserve_kv_blocks")


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_are_well_formed(traffic: Traffic, name: str) -> None:
    for scrape in (traffic.before, traffic.during, traffic.after):
        histogram = scrape.histogram(name)
        numbers = list(histogram.cumulative.values())
        assert all(low <= high for low, high in itertools.pairwise(numbers))
        assert list(histogram.cumulative)[-1] == float("inf")
    assert numbers[-1] == histogram.count
    bounds = [0.0, *histogram.cumulative]
    counts = [high - low for low, high in itertools.pairwise([0.0, *numbers])]
    least = sum(low * count for low, count in zip(bounds, counts, strict=False))
    assert least <= histogram.sum
    assert counts[-1] == 0  # the buckets reach beyond the length of the test
    most = sum(high * count for high, count in zip(bounds[1:-1], counts, strict=False))
    assert histogram.sum <= most


def test_only_the_time_between_tokens_is_no_histogram_by_type(traffic: Traffic) -> None:
    types = {name: traffic.after.types.get(name) for name in HISTOGRAMS}
    assert types.pop("fastserve_inter_token_seconds") is None
    assert set(types.values()) == {"histogram"}
    for suffix in ("bucket", "sum", "count"):
        assert traffic.after.types[f"fastserve_inter_token_seconds_{suffix}"] == "counter"


def test_every_token_is_a_first_one_or_follows_another(traffic: Traffic) -> None:
    first = grown(traffic, "fastserve_time_to_first_token_seconds")
    later = grown(traffic, "fastserve_inter_token_seconds")
    assert first.count + later.count == traffic.grown("fastserve_generation_tokens_total")
    begun = [answer for answer in traffic.cancelled if answer.token_ids]
    at_least = len(traffic.completed) + len(begun)
    assert at_least <= first.count <= len(traffic.completed) + len(traffic.cancelled)
    known_s = sum(ttft_s(answer) for answer in traffic.completed)
    assert known_s - TOLERANCE_S <= first.sum <= known_s + traffic.cancelled_s
    known_s = sum(e2e_s(answer) - ttft_s(answer) for answer in traffic.completed)
    assert known_s - TOLERANCE_S <= later.sum <= known_s + traffic.cancelled_s


def test_completed_requests_are_counted_with_the_latency_that_their_clients_were_told(
    traffic: Traffic,
) -> None:
    e2e = grown(traffic, "fastserve_e2e_seconds")
    normalized = grown(traffic, "fastserve_normalized_latency_seconds")
    queue = grown(traffic, "fastserve_queue_seconds")
    number = len(traffic.completed)
    assert (e2e.count, normalized.count, queue.count) == (number, number, number)

    latencies = [e2e_s(answer) for answer in traffic.completed]
    per_token = [e2e_s(answer) / len(answer.token_ids) for answer in traffic.completed]
    for values, histogram in ((latencies, e2e), (per_token, normalized)):
        assert histogram.sum == pytest.approx(sum(values), abs=number * TOLERANCE_S)
        for bound, cumulative in histogram.cumulative.items():
            surely = sum(value <= bound - TOLERANCE_S for value in values)
            perhaps = sum(value <= bound + TOLERANCE_S for value in values)
            assert surely <= cumulative <= perhaps

    waited_s = sum(first_wait_s(answer) for answer in traffic.completed)
    assert waited_s - TOLERANCE_S <= queue.sum < e2e.sum
    # Most came at once and 4 run together: most of their time is waiting.
    assert queue.sum > e2e.sum / 4


def test_a_restart_of_the_ranks_is_counted(server: TritonServer, traffic: Traffic) -> None:
    url, name = server.endpoints.metrics_url, "fastserve_worker_restarts_total"
    assert traffic.after.value(name) == 0
    settle(server.endpoints)  # other tests may have sent requests
    before = Scrape(url)
    os.kill(rank_pid(server.runtime), signal.SIGKILL)
    after = scrape_when(url, lambda now: now.value(name) == before.value(name) + 1)
    total = "fastserve_requests_total"
    assert after.total(total) == before.total(total)
