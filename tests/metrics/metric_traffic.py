"""Requests of every kind to a server that is short of KV blocks, and their results."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from fastserve_backend.serving.launch import TritonServer
from running_server import rank_stopped
from scrape import Scrape
from serving_client import (
    SETTLE_REFUSALS,
    Answer,
    GrpcStream,
    generate,
    settle,
    unfinished_jobs,
)
from waiting import wait_for

BLOCK_SIZE = 16
DEVICE_BLOCKS = 120
MAX_NUM_SEQS = 4
# Of jobs that are cancelled: as many as the device holds, so that none ends before.
CANCELLED_TOKENS = 1800
TENANT = 'the "acme" é'
FIRST_TURN_TOKENS = 30  # of the session with two turns
"""Of one request with a prompt of three tokens and one token of output."""
# No first token comes as soon as the one, and a token a minute is slower than any machine here.
TTFT_SLO_MS, TPOT_SLO_MS = 0.001, 60e3
NUM_STREAMS = 48
MOST_ROUNDS = 5
PROMPT_TOKENS = 500
OUTPUT_TOKENS = 40  # 34 blocks a job in the end
IDLE_TIMEOUT_S, STREAMS_TIMEOUT_S = 60.0, 120.0
PROBE_TOKENS = 100  # between two looks at the states of jobs
SHOWN_S = 1.5  # metrics are published every half second


@dataclass(frozen=True)
class Traffic:
    """Clients' requests and answers between two scrapes of the idle server."""

    before: Scrape
    during: Scrape
    """A scrape while jobs ran, waited and were swapped out."""
    after: Scrape
    lengths: list[Answer]
    """Answers that ended at their ``max_tokens``."""
    stops: list[Answer]
    """Answers that a stop word ended."""
    cancelled: list[Answer]
    """Partial answers of cancelled requests: tokens, or nothing yet."""
    cancelled_s: float
    """Total seconds from sending to cancelling."""
    prompt_tokens: int
    num_rejected: int

    @property
    def completed(self) -> list[Answer]:
        return self.lengths + self.stops

    def grown(self, name: str, **labels: str) -> float:
        return self.after.value(name, **labels) - self.before.value(name, **labels)


def drive(server: TritonServer) -> Traffic:
    """Sends all requests and waits until the metrics count them."""
    endpoints = server.endpoints
    url, metrics_url = endpoints.grpc_url, endpoints.metrics_url
    rng = random.Random(11)
    sent = 0

    def prompt(length: int = PROMPT_TOKENS) -> list[int]:
        nonlocal sent
        sent += length
        return [rng.randrange(3, 1024) for _ in range(length)]

    # The launcher's probe was a request too.
    before = idle(metrics_url, ended=1, rejected=0)
    flags = {
        "stream": True,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_perf_metrics": True,
        "return_finish_reason": True,
    }
    during = None
    lengths = []
    for _ in range(MOST_ROUNDS):
        with rank_stopped(server.runtime):  # so all come at once, however slow this process is
            streams = [
                GrpcStream(url, input_ids=prompt(), max_tokens=OUTPUT_TOKENS, **flags)
                for _ in range(NUM_STREAMS)
            ]
            wait_for(lambda: unfinished_jobs(metrics_url) == NUM_STREAMS, STREAMS_TIMEOUT_S)
        during = scrape_of_every_state(server, streams)
        lengths += [stream.finish() for stream in streams]
        if during is not None:
            break
    assert during is not None, "no scrape had running, waiting and swapped jobs"

    again = prompt()
    whole = generate(url, input_ids=again, max_tokens=20, **flags)
    sent += len(again)
    word = whole.text[len(whole.text) // 2 :][:2]
    stops = [generate(url, input_ids=again, max_tokens=20, stop_words=[word], **flags)]
    # One token is a first token without a later one.
    single = generate(url, input_ids=prompt(3), max_tokens=1, tenant=TENANT, **flags)
    lengths += [whole, single]

    num_settled = 0
    for _ in range(MOST_ROUNDS):
        began = time.monotonic()
        cancelled = [
            GrpcStream(url, input_ids=prompt(50), max_tokens=CANCELLED_TOKENS, **flags)
            for _ in range(3)
        ]
        for stream in cancelled[:2]:
            stream.first_token()
        with rank_stopped(server.runtime):
            settle(endpoints)
            num_settled += 1
            if are_unfinished := unfinished_jobs(metrics_url) == len(cancelled):
                for stream in cancelled:
                    stream.cancel()
                break
        lengths += [stream.finish() for stream in cancelled]
    assert are_unfinished, "a job always ended before it was cancelled"

    turn = prompt(FIRST_TURN_TOKENS)
    lengths.append(generate(url, input_ids=turn, max_tokens=1, session_id="s", **flags))
    turn += [*lengths[-1].token_ids, 5]
    lengths.append(generate(url, input_ids=turn, max_tokens=1, session_id="s", **flags))
    sent += len(turn)

    refused = [generate(url, text_input="a", max_tokens=number) for number in (0, -1, 10**6)]
    assert all(answer.error is not None for answer in refused)
    ended = 1 + len(lengths) + len(stops) + len(cancelled)
    num_rejected = len(refused) + num_settled * SETTLE_REFUSALS
    after = idle(metrics_url, ended=ended, rejected=num_rejected)
    return Traffic(
        before,
        during,
        after,
        lengths,
        stops,
        [stream.answer for stream in cancelled],
        len(cancelled) * (time.monotonic() - began),
        sent,
        num_rejected,
    )


def scrape_of_every_state(server: TritonServer, streams: list[GrpcStream]) -> Scrape | None:
    """A scrape with running, waiting and swapped jobs in all gauges of load; None if the streams
    end before. Gauges are published one after the other, and a scrape may fall between."""
    states = ("running", "waiting", "swapped")

    def shows_every_state(now: Scrape) -> bool:
        return (
            all(now.value("fastserve_jobs", state=state) > 0 for state in states)
            and now.total("fastserve_queue_jobs") > 0
            and now.value("fastserve_priority_jobs", priority="0") > 0
            and now.value("fastserve_kv_blocks", tier="device", state="used") > 0
        )

    found: list[Scrape] = []

    def is_shown() -> bool:
        found.append(Scrape(server.endpoints.metrics_url))
        return shows_every_state(found[-1])

    def num_tokens() -> int:
        return sum(stream.pending() for stream in streams)

    while not all(stream.answer.num_finals for stream in streams):
        with rank_stopped(server.runtime):
            with suppress(AssertionError):
                wait_for(is_shown, SHOWN_S)
                return found[-1]
            wanted = min(num_tokens() + PROBE_TOKENS, NUM_STREAMS * OUTPUT_TOKENS)
        wait_for(lambda wanted=wanted: num_tokens() >= wanted, STREAMS_TIMEOUT_S)
    return None


def scrape_when(metrics_url: str, condition: Callable[[Scrape], bool]) -> Scrape:
    """The first scrape for which ``condition`` holds."""
    found: list[Scrape] = []

    def holds() -> bool:
        found.append(Scrape(metrics_url))
        return condition(found[-1])

    wait_for(holds, IDLE_TIMEOUT_S)
    return found[-1]


def idle(metrics_url: str, *, ended: int, rejected: int) -> Scrape:
    """A scrape that counts this many ended jobs and refused requests since the start."""

    def at_rest(now: Scrape) -> bool:
        return (
            now.total("fastserve_requests_total") == ended
            and now.total("fastserve_requests_rejected_total") == rejected
            and now.total("fastserve_jobs") == 0
            and now.total("fastserve_queue_jobs") == 0
            and now.total("fastserve_priority_jobs") == 0
            # The last step's blocks are freed a moment after the job's end.
            and now.total("fastserve_kv_blocks", state="used") == 0
        )

    return scrape_when(metrics_url, at_rest)
