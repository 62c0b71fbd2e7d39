"""The log of requests says how each one ended, and has none of its words."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from collector import Collector
from fastserve_backend import SamplingParams
from fastserve_backend.job import ServiceLevel
from live_engine import small_engine
from waiting import DEADLINE_S

pytestmark = pytest.mark.usefixtures("forked_ranks")

LOGGER = "fastserve_backend.engine.request_log"
PROMPT = [5, 7, 9]


@pytest.mark.parametrize("log_requests", [False, True])
def test_each_request_has_a_line_if_wanted(
    checkpoint: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture, log_requests: bool
) -> None:
    service = ServiceLevel(priority=-1, ttft_slo_s=600.0, tpot_slo_s=1e-9, tenant="acme")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    done, cancelled = Collector(), Collector()
    with (
        caplog.at_level(logging.INFO, LOGGER),
        small_engine(checkpoint, tokenizer, log_requests=log_requests) as small,
    ):
        small.engine.submit("on\ne", PROMPT, params, done, service=service)
        done.wait()
        number = small.engine.submit("two", PROMPT, long, cancelled)
        assert cancelled.started.wait(DEADLINE_S)
        small.engine.cancel(number)
        cancelled.wait()
    lines = [one.getMessage() for one in caplog.records if one.name == LOGGER]
    if not log_requests:
        assert lines == []
        return
    assert len(lines) == 2
    assert lines[0].startswith("request 'on\\ne' of tenant 'acme' at priority -1: length after 0.")
    assert lines[0].endswith("3 + 3 tokens, ttft kept, tpot missed")
    assert lines[1].startswith("request 'two' of tenant '' at priority 0: cancelled after 0.")
    assert "kept" not in lines[1]
    assert "missed" not in lines[1]
