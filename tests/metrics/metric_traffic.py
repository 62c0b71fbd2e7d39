"""Requests of every kind to a server that is short of KV blocks, and their results."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastserve_backend.serving.endpoints import Endpoints
from scrape import Scrape
from serving_client import Answer, GrpcStream, generate
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
NUM_STREAMS = 48  # long, as values are published only twice a second
MOST_ROUNDS = 5  # on a busy machine no value may be published while jobs are in every state
PROMPT_TOKENS = 500
OUTPUT_TOKENS = 40  # 34 blocks a job in the end
IDLE_TIMEOUT_S, STREAMS_TIMEOUT_S = 30.0, 60.0


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


def drive(endpoints: Endpoints) -> Traffic:
    """Sends all requests and waits until the metrics count them."""
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
        streams = [
            GrpcStream(url, input_ids=prompt(), max_tokens=OUTPUT_TOKENS, **flags)
            for _ in range(NUM_STREAMS)
        ]
        during = scrape_of_every_state(metrics_url, streams)
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

    began = time.monotonic()
    cancelled = [
        GrpcStream(url, input_ids=prompt(50), max_tokens=CANCELLED_TOKENS, **flags)
        for _ in range(3)
    ]
    for stream in cancelled[:2]:
        stream.first_token()
    for stream in cancelled:
        stream.cancel()

    turn = prompt(FIRST_TURN_TOKENS)
    lengths.append(generate(url, input_ids=turn, max_tokens=1, session_id="s", **flags))
    turn += [*lengths[-1].token_ids, 5]
    lengths.append(generate(url, input_ids=turn, max_tokens=1, session_id="s", **flags))
    sent += len(turn)

    refused = [generate(url, text_input="a", max_tokens=number) for number in (0, -1, 10**6)]
    assert all(answer.error is not None for answer in refused)
    ended = 1 + len(lengths) + len(stops) + len(cancelled)
    after = idle(metrics_url, ended=ended, rejected=len(refused))
    return Traffic(
        before,
        during,
        after,
        lengths,
        stops,
        [stream.answer for stream in cancelled],
        len(cancelled) * (time.monotonic() - began),
        sent,
        len(refused),
    )


def scrape_of_every_state(metrics_url: str, streams: list[GrpcStream]) -> Scrape | None:
    """The first scrape with running, waiting and swapped jobs in all gauges of load; None if the
    streams end before. Gauges are published one after the other, and a scrape may fall between."""
    found: list[Scrape] = []

    def has_shown_or_ended() -> bool:
        now = Scrape(metrics_url)
        states = ("running", "waiting", "swapped")
        if (
            all(now.value("fastserve_jobs", state=state) > 0 for state in states)
            and now.total("fastserve_queue_jobs") > 0
            and now.value("fastserve_priority_jobs", priority="0") > 0
            and now.value("fastserve_kv_blocks", tier="device", state="used") > 0
        ):
            found.append(now)
        for stream in streams:
            stream.pending()
        return bool(found) or all(stream.answer.num_finals for stream in streams)

    wait_for(has_shown_or_ended, STREAMS_TIMEOUT_S)
    return found[0] if found else None


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
