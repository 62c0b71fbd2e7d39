"""Fit a latency profile to measured iterations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.profile.latency import Curve, Identity, LatencyProfile
from fastserve_backend.rank_protocol.link import Link

# Where the curves may bend: from this many rows on, multiplying takes longer than reading the
# weights. On real machines that is somewhere between one row and a few hundred.
_TOKEN_KNOTS = (1, 4, 16, 64, 256)
_SAMPLED_KNOTS = (1, 8, 64)
# Penalty for a bend, so that noise does not make one: as much as this relative error in one sample.
_BEND_COST = 0.05
# Larger relative residuals count as disturbances: they have linear, not quadratic, weight.
_OUTLIER = 0.05
_REWEIGHTINGS = 5
_TOLERANCE = 1e-10
_TINY = 1e-300

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured iteration."""

    load: IterationLoad
    seconds: float


def fit(
    identity: Identity, num_blocks: int, link: Link, samples: Sequence[Sample]
) -> LatencyProfile:
    """Fit a profile by least squares on relative errors, with no coefficient below zero.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("need at least one sample")
    seconds = np.array([sample.seconds for sample in samples])
    tokens = np.array([sample.load.num_tokens for sample in samples])
    sampled = np.array([sample.load.num_sampled for sample in samples])
    token_knots = _knots(_TOKEN_KNOTS, tokens)
    sampled_knots = _knots(_SAMPLED_KNOTS, sampled)
    # A pair costs more in a decode than in a prefill, whose queries share what they read. So the
    # coefficients are nested: one for all pairs, and an extra one for those of decodes. A separate
    # coefficient for prefills would depend on a few long ones alone, which are easily disturbed.
    decode, prefill = np.array(
        [(s.load.decode_context, s.load.prefill_pairs) for s in samples], dtype=np.float64
    ).T
    ones = np.ones(len(samples))
    # Without experts its column is 0, and so is its coefficient.
    experts_read = 1.0 - identity.unchosen_share**tokens
    others = np.stack([ones, decode + prefill, decode, experts_read], axis=1)
    features = np.hstack([others, _ramps(token_knots, tokens), _ramps(sampled_knots, sampled)])
    # Relative residuals: a 5 ms iteration counts as much as a 500 ms one.
    features /= seconds[:, None]
    first = others.shape[1]
    bends = np.vstack(
        [
            _bends(features, first, len(token_knots)),
            _bends(features, first + len(token_knots), len(sampled_knots)),
        ]
    )
    base_s, pair_s, single_s, experts_s, *slopes = _robust_nonnegative(features, bends)
    return LatencyProfile(
        identity=identity,
        num_blocks=num_blocks,
        link=link,
        num_samples=len(samples),
        held_out_error=None,
        base_s=base_s,
        tokens=Curve(token_knots, tuple(slopes[: len(token_knots)])),
        sampled=Curve(sampled_knots, tuple(slopes[len(token_knots) :])),
        decode_context_s=pair_s + single_s,
        prefill_pair_s=pair_s,
        experts_s=experts_s,
    )


def mean_error(model: LatencyModel, samples: Sequence[Sample]) -> float:
    """Mean of |predicted - measured| / measured."""
    return statistics.fmean(
        abs(model.iteration_s(sample.load) - sample.seconds) / sample.seconds for sample in samples
    )


def _knots(candidates: Sequence[int], values: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """0, and the candidates that have measured values on both sides."""
    return (0, *(knot for knot in candidates if values.min() <= knot < values.max()))


def _ramps(knots: tuple[int, ...], values: npt.NDArray[np.int64]) -> Floats:
    """How far each value reaches into the segment after each knot, ``[values, knots]``."""
    ends = np.array([*knots[1:], np.inf])
    starts = np.array(knots)
    ramps: Floats = np.clip(values[:, None], starts, ends) - starts
    return ramps


def _bends(features: Floats, first: int, count: int) -> Floats:
    """One row for each pair of neighbouring slopes; it is zero if the slopes are equal."""
    rows = np.zeros((count - 1, features.shape[1]))
    for index in range(count - 1):
        # Scaled by the largest share of an iteration that both segments reach.
        left, right = first + index, first + index + 1
        weight = _BEND_COST * min(features[:, left].max(), features[:, right].max())
        rows[index, left], rows[index, right] = -weight, weight
    return rows


def _robust_nonnegative(features: Floats, bends: Floats) -> list[float]:
    """Coefficients c >= 0 such that ``features @ c`` is near 1 and ``bends @ c`` near 0."""
    weights = np.ones(len(features))
    solution = np.zeros(features.shape[1])
    for _ in range(_REWEIGHTINGS):
        matrix = np.vstack([features * weights[:, None], bends])
        target = np.concatenate([weights, np.zeros(len(bends))])
        solution = _nonnegative_least_squares(matrix, target)
        residuals = np.abs(features @ solution - 1)
        weights = np.sqrt(_OUTLIER / np.maximum(residuals, _OUTLIER))
    return [float(value) for value in solution]


def _nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """min |matrix @ x - target|, x >= 0, by active sets (Lawson and Hanson 1974, chapter 23)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    matrix = matrix / scale
    count = matrix.shape[1]
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    # Each turn frees one coefficient and may bind others. Rounding errors could make that endless.
    for _ in range(3 * count):
        gradient = np.where(free, -np.inf, matrix.T @ (target - matrix @ x))
        if gradient.max() <= _TOLERANCE:
            break
        free[int(np.argmax(gradient))] = True
        while free.any():
            wanted = np.zeros(count)
            wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                x = wanted
                break
            # Move towards it, until the first coefficient reaches zero.
            x += (x[below] / (x[below] - wanted[below] + _TINY)).min() * (wanted - x)
            free &= x > _TOLERANCE
            x[~free] = 0
    x /= scale
    return x
