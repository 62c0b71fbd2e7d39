"""A profile from busy cores is marked, and costs a server no seats for ever."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from busy_cores import busy_cores
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.profile.latency import Curve, LatencyProfile
from fastserve_client.engine_state import EngineState
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")

MAX_ITERATIONS = 3000


def serving(checkpoint: Path, tokenizer: Path) -> LLM:
    return LLM(str(checkpoint), tokenizer=str(tokenizer), device_blocks=600)


def seats_of(llm: LLM) -> int:
    states: list[EngineState | None] = []
    watch = llm.engine.watch(1.0, states.append)
    wait_for(lambda: bool(states))
    llm.engine.unwatch(watch)
    assert states[0] is not None
    (seats,) = re.findall(r"at most (\d+) jobs?", states[0].policy_description)
    return int(seats)


def as_if(profile: LatencyProfile, tokens: Curve, *, busy: bool) -> LatencyProfile:
    """A profile of the same ranks, in which only this takes time."""
    nothing = Curve((0,), (0.0,))
    zeros = dict.fromkeys(("base_s", "decode_context_s", "prefill_pair_s", "experts_s"), 0.0)
    return replace(profile, tokens=tokens, sampled=nothing, busy=busy, **zeros)  # type: ignore[arg-type]


def test_a_bad_profile_is_reported_and_measured_again_and_costs_no_seats_for_ever(
    checkpoint: Path, tokenizer: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(checkpoint, tokenizer) as llm:
        measured = llm.engine.profile.model
    assert isinstance(measured, LatencyProfile)
    (path,) = cache.iterdir()

    # It was measured on a busy machine, so it is measured again. It stays only if the machine is
    # busy again, since it is faster than any machine, up to 8 jobs. A ninth takes a second.
    few_seats = as_if(measured, Curve((0, 8), (1e-7, 1.0)), busy=True)
    few_seats.save(path)
    caplog.set_level(logging.INFO)
    with busy_cores(), serving(checkpoint, tokenizer) as llm:
        assert llm.engine.profile.model == few_seats
    assert "of an earlier start" in caplog.text
    assert "at most 8 jobs (measured on a busy machine? fastserve profile)" in caplog.text

    # 50 ms a job, and not marked: it is used, and serving shows that it is wrong.
    as_if(measured, Curve((0,), (0.05,)), busy=False).save(path)
    with serving(checkpoint, tokenizer) as llm:
        assert seats_of(llm) == 2
        for _ in range(0, MAX_ITERATIONS, 100):
            llm.generate([[5] * 8] * 4, SamplingParams(max_tokens=100, ignore_eos=True))
            if LatencyProfile.load(path).busy:
                break
        assert LatencyProfile.load(path).busy
        assert seats_of(llm) >= 6
