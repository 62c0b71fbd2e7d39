from __future__ import annotations

import math

import numpy as np
import pytest
from fastserve_bench.workload import (
    AUTHORS_LIMITS,
    NO_LIMITS,
    LengthLimits,
    load_lengths,
    scale_ratio,
)
from fastserve_client.errors import WorkloadError
from hypothesis import assume, given
from hypothesis import strategies as st

# From the vLLM paper (Kwon et al. 2023), §6.1.
_PUBLISHED_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
# Statistics of the logarithms of lengths in public files, which the module's docstring names.
_SPREADS = {"sharegpt": (1.400, 1.095), "alpaca": (0.496, 1.220)}


@pytest.mark.parametrize("name", _PUBLISHED_MEANS)
def test_synthetic_sets_have_the_published_means_and_spreads(name: str) -> None:
    lengths = np.array(load_lengths(name))
    assert lengths.mean(axis=0) == pytest.approx(_PUBLISHED_MEANS[name], rel=0.01)
    assert np.log(lengths).std(axis=0) == pytest.approx(_SPREADS[name], rel=0.01)


@pytest.mark.parametrize("name", _PUBLISHED_MEANS)
def test_synthetic_sets_are_within_the_authors_limits(name: str) -> None:
    lengths = load_lengths(name)
    assert load_lengths(name, AUTHORS_LIMITS) == lengths
    assert min(min(pair) for pair in lengths) >= 1


@pytest.mark.parametrize("name", _PUBLISHED_MEANS)
def test_synthetic_sets_have_long_tails(name: str) -> None:
    outputs = np.array(load_lengths(name))[:, 1]
    assert np.median(outputs) < 0.8 * outputs.mean()
    assert np.percentile(outputs, 99) > 2.5 * outputs.mean()


def test_prompts_and_outputs_of_a_synthetic_set_are_independent() -> None:
    prompts, outputs = np.log(load_lengths("sharegpt")).T
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.03


def test_limits_leave_out_longer_jobs() -> None:
    limits = LengthLimits(max_prompt_tokens=10, max_total_tokens=15)
    assert limits.allow(10, 5)
    assert not limits.allow(11, 1)
    assert not limits.allow(9, 7)
    assert NO_LIMITS.allow(10**9, 10**9)
    kept = load_lengths("alpaca", limits)
    assert kept == [pair for pair in load_lengths("alpaca") if limits.allow(*pair)]
    assert 0 < len(kept) < 10_000


def test_limits_that_no_job_can_meet() -> None:
    with pytest.raises(WorkloadError, match=r"^max_prompt_tokens: got 0; must be at least 1$"):
        LengthLimits(max_prompt_tokens=0)
    with pytest.raises(WorkloadError, match=r"^max_total_tokens: got 1; must be at least 2$"):
        LengthLimits(max_total_tokens=1)


def test_equal_lengths_scale_to_the_ratio() -> None:
    assert scale_ratio([(100, 100)], 3.0) == [(150, 50)]
    # 13⅓ and 6⅔ are the exact lengths: each goes to the nearer whole token.
    assert scale_ratio([(10, 10)], 2.0) == [(13, 7)]


def test_both_kinds_keep_their_shapes() -> None:
    assert scale_ratio([(100, 400), (300, 800)], 1.0) == [(200, 267), (600, 533)]


@pytest.mark.slow
@given(st.floats(0.1, 10.0))
def test_the_ratio_and_the_mean_total_hold_under_the_authors_limits(ratio: float) -> None:
    lengths = load_lengths("sharegpt")
    scaled = scale_ratio(lengths, ratio, AUTHORS_LIMITS)
    prompts, outputs = np.array(scaled).T
    assert prompts.mean() / outputs.mean() == pytest.approx(ratio, rel=0.01)
    assert (prompts + outputs).mean() == pytest.approx(np.array(lengths).sum(1).mean(), rel=0.01)
    assert all(AUTHORS_LIMITS.allow(*pair) for pair in scaled)
    assert min(prompts.min(), outputs.min()) >= 1


_pairs = st.tuples(st.integers(1, 5000), st.integers(1, 5000))


@given(
    st.lists(_pairs, min_size=1, max_size=40),
    st.floats(0.01, 100),
    st.none() | st.integers(1, 3000),
    st.none() | st.integers(2, 6000),
)
def test_scaled_lengths_always_meet_the_limits(
    lengths: list[tuple[int, int]], ratio: float, max_prompt: int | None, max_total: int | None
) -> None:
    limits = LengthLimits(max_prompt, max_total)
    try:
        scaled = scale_ratio(lengths, ratio, limits)
    except WorkloadError:
        assume(False)
    assert all(limits.allow(*pair) and min(pair) >= 1 for pair in scaled)
    mean_total = np.array(lengths).sum(axis=1).mean()
    # Every job may round by half a token, and equal jobs all to the same side.
    assert np.array(scaled).sum(axis=1).mean() == pytest.approx(mean_total, abs=1.01)


def test_ratios_that_the_limits_forbid() -> None:
    with pytest.raises(WorkloadError) as error:
        scale_ratio([(700, 700)], 6.0, AUTHORS_LIMITS)
    assert str(error.value) == (
        "ratio: got 6, which needs a mean length of 1200.0 tokens; "
        "must leave it between 1 and 1024.0"
    )


def test_ratios_that_leave_less_than_a_token() -> None:
    with pytest.raises(WorkloadError, match=r"^ratio: got 100, which needs a mean length of 0\.2 "):
        scale_ratio([(10, 10)], 100.0)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_ratios_out_of_range(ratio: float) -> None:
    with pytest.raises(WorkloadError, match=f"^ratio: got {ratio:g}; must be a finite number"):
        scale_ratio([(1, 1)], ratio)


def test_no_lengths_have_no_ratio() -> None:
    with pytest.raises(WorkloadError, match=r"^lengths: got none; "):
        scale_ratio([], 1.0)
