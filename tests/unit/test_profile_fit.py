"""Fitting recovers known coefficients, even from noisy times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fastserve_backend.profile.fit import Sample, fit, mean_error
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.loads import full_grid, random_mixes
from hypothesis import given
from hypothesis import strategies as st
from matrices import random_examples
from profiles import LIMITS, LINK, identity, known_profile


def samples_of(count: int, seed: int, grid: bool = True) -> list[Sample]:
    truth = known_profile()
    mixes = random_mixes(LIMITS, count, random.Random(seed)) + (full_grid(LIMITS) if grid else [])
    loads = [IterationLoad.of(mix) for mix in mixes]
    return [Sample(load, truth.iteration_s(load)) for load in loads]


def test_a_fit_predicts_mixes_that_it_has_not_seen() -> None:
    fitted = fit(identity(), 100, LINK, samples_of(20, seed=1))
    unseen = samples_of(200, seed=2, grid=False)
    assert mean_error(fitted, unseen) < 0.02
    truth = known_profile()
    for length in (3, 50, 700, 2000):
        assert fitted.prefill_s(length) == pytest.approx(truth.prefill_s(length), rel=0.05)
        assert fitted.decode_s(length) == pytest.approx(truth.decode_s(length), rel=0.05)


def test_the_experts_that_a_batch_reads_are_fitted() -> None:
    """8 of 64 experts a token: from 1 to 16 tokens, the time grows less and less."""
    shape = {**identity().shape, "experts": {"count": 64, "top_k": 8}}
    truth = replace(known_profile(), identity=identity(shape=shape), experts_s=0.02)
    mixes = random_mixes(LIMITS, 20, random.Random(1)) + full_grid(LIMITS)
    loads = [IterationLoad.of(mix) for mix in mixes]
    samples = [Sample(load, truth.iteration_s(load)) for load in loads]
    fitted = fit(truth.identity, 100, LINK, samples)
    assert fitted.experts_s == pytest.approx(0.02, rel=0.1)
    for jobs in (1, 2, 3, 6, 12):  # of which few were measured
        assert fitted.decodes_s(jobs, 100) == pytest.approx(truth.decodes_s(jobs, 100), rel=0.02)
    assert fit(identity(), 100, LINK, samples).experts_s == 0


def test_disturbed_samples_do_not_spoil_the_others() -> None:
    samples = samples_of(30, seed=3)
    rng = random.Random(4)
    disturbed = [
        Sample(sample.load, sample.seconds * (3.0 if rng.random() < 0.1 else 1.0))
        for sample in samples
    ]
    assert mean_error(fit(identity(), 100, LINK, disturbed), samples) < 0.05


def test_one_sample_is_enough_and_none_is_refused() -> None:
    only = Sample(IterationLoad.of([(0, 8, True)]), 0.02)
    assert fit(identity(), 100, LINK, [only]).prefill_s(8) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="one sample"):
        fit(identity(), 100, LINK, [])


job = st.tuples(st.integers(0, 2000), st.integers(1, 2000), st.booleans())
mix = st.lists(job, min_size=1, max_size=20)


@pytest.mark.slow
@given(
    measured=st.lists(st.tuples(mix, st.floats(1e-5, 10.0)), min_size=1, max_size=20),
    asked=mix,
    more=st.lists(job, max_size=5),
)
@random_examples(150)
def test_noise_never_gives_a_falling_or_negative_prediction(
    measured: list[tuple[list[tuple[int, int, bool]], float]],
    asked: list[tuple[int, int, bool]],
    more: list[tuple[int, int, bool]],
) -> None:
    fitted = fit(identity(), 100, LINK, [Sample(IterationLoad.of(m), s) for m, s in measured])
    few = fitted.iteration_s(IterationLoad.of(asked))
    many = fitted.iteration_s(IterationLoad.of(asked + more))
    assert 0 < few <= many * (1 + 1e-9)
