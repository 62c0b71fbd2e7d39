"""Correcting predictions while serving."""

from __future__ import annotations

import random

import pytest
from fastserve_backend.profile.correction import CorrectedLatency
from fastserve_backend.profile.iteration import IterationLoad
from hypothesis import given
from hypothesis import strategies as st
from profiles import known_profile

DECODE = IterationLoad.of([(100, 1, True)] * 4)
MIXED = IterationLoad.of([(100, 1, True), (0, 200, True)])


def observe(model: CorrectedLatency, load: IterationLoad, factor: float, times: int) -> int:
    """The number of times that predictions count as moved."""
    truth_s = model.model.iteration_s(load)
    return sum(model.observe(load, factor * truth_s) for _ in range(times))


@pytest.mark.parametrize("factor", [0.5, 1.4, 2.0])
def test_a_machine_of_another_speed_is_learned_in_fifty_iterations(factor: float) -> None:
    model = CorrectedLatency(known_profile())
    assert observe(model, DECODE, factor, times=50) >= 1
    assert model.decode_ratio == pytest.approx(factor, rel=0.1)
    assert model.iteration_s(DECODE) == pytest.approx(
        model.decode_ratio * known_profile().iteration_s(DECODE)
    )
    assert model.decode_s(1) == pytest.approx(model.decode_ratio * known_profile().decode_s(1))


def test_log_probabilities_of_prompts_are_as_slow_as_prompts() -> None:
    model = CorrectedLatency(known_profile())
    observe(model, MIXED, 2.0, 100)
    expected = model.prefill_ratio * known_profile().score_s(50)
    assert model.score_s(50) == pytest.approx(expected)


def test_decodes_and_prefills_have_their_own_ratios() -> None:
    model = CorrectedLatency(known_profile())
    observe(model, DECODE, 2.0, times=100)
    assert model.prefill_ratio == 1.0
    assert model.prefill_s(100) == known_profile().prefill_s(100)
    observe(model, MIXED, 0.7, times=100)
    assert model.prefill_ratio == pytest.approx(0.7, rel=0.05)
    assert model.decode_ratio == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("factor", [0.0, 0.01, 100.0, float("inf")])
def test_one_absurd_iteration_changes_next_to_nothing(factor: float) -> None:
    model = CorrectedLatency(known_profile())
    assert observe(model, DECODE, factor, times=1) == 0
    assert model.decode_ratio == pytest.approx(1.0, rel=0.06)


def test_noise_around_the_prediction_is_no_drift() -> None:
    model = CorrectedLatency(known_profile())
    rng = random.Random(1)
    moved = sum(observe(model, DECODE, rng.uniform(0.8, 1.25), times=1) for _ in range(2000))
    assert moved == 0


def test_a_drift_is_reported_once_and_again_when_it_goes_on() -> None:
    model = CorrectedLatency(known_profile())
    assert observe(model, DECODE, 1.2, times=500) == 1
    assert observe(model, DECODE, 1.2, times=500) == 0
    assert observe(model, DECODE, 1.0, times=500) == 1


@given(st.lists(st.floats(0.0, 1e9), max_size=300))
def test_the_correction_stays_within_bounds(factors: list[float]) -> None:
    model = CorrectedLatency(known_profile())
    for factor in factors:
        observe(model, DECODE, factor, times=1)
    assert 1 / 30.001 <= model.decode_ratio <= 30.001
