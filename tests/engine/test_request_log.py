"""The log of requests says how each one ended, and has none of its words."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from collector import Collector
from engine_ranks import held_job
from fastserve_backend import SamplingParams
from fastserve_backend.job import ServiceLevel
from live_engine import small_engine

pytestmark = pytest.mark.usefixtures("forked_ranks")

LOGGER = "fastserve_backend.engine.request_log"
PROMPT = (5, 7, 9)


@pytest.mark.parametrize("log_requests", [False, True])
def test_each_request_has_a_line_if_wanted(
    checkpoint: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture, log_requests: bool
) -> None:
    service = ServiceLevel(priority=-1, ttft_slo_s=600.0, tpot_slo_s=1e-9, tenant="acme")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    done = Collector()
    with (
        caplog.at_level(logging.INFO, LOGGER),
        small_engine(checkpoint, tokenizer, log_requests=log_requests) as small,
    ):
        small.engine.submit("on\ne", PROMPT, params, done, service=service)
        done.wait()
        with held_job(small, long, job_id="two", prompt=PROMPT) as (number, cancelled):
            small.engine.cancel(number)
        cancelled.wait()
    lines = [one.getMessage() for one in caplog.records if one.name == LOGGER]
    if not log_requests:
        assert lines == []
        return
    assert len(lines) == 2
    first, second = (re.sub(r"after \d+\.", "after 0.", line, count=1) for line in lines)
    assert first.startswith("request 'on\\ne' of tenant 'acme' at priority -1: length after 0.")
    assert first.endswith("3 + 3 tokens, ttft kept, tpot missed")
    assert second.startswith("request 'two' of tenant '' at priority 0: cancelled after 0.")
    assert "kept" not in second
    assert "missed" not in second
