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

# Where the curves may bend. Powers of two, because costs bend where a matrix gets as many rows as
# weights are worth reading for: anywhere between one and a few hundred.
_TOKEN_KNOTS = (1, 4, 16, 64, 256)
_SAMPLED_KNOTS = (1, 8, 64)
# How much a bend must explain before it is believed: it costs as much as this relative error in one
# sample.
_BEND_COST = 0.05
# Residuals beyond this are taken for disturbances of the machine and count by their size, not their
# square.
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
    """Least squares on relative errors, no coefficient below zero.

    Raises:
        ValueError: no sample.
    """
    if not samples:
        raise ValueError("need at least one sample")
    seconds = np.array([sample.seconds for sample in samples])
    tokens = np.array([sample.load.num_tokens for sample in samples])
    sampled = np.array([sample.load.num_sampled for sample in samples])
    token_knots = _knots(_TOKEN_KNOTS, tokens)
    sampled_knots = _knots(_SAMPLED_KNOTS, sampled)
    # A single query, which shares what it reads with none, costs more a pair than a prefill's. So
    # the coefficients are nested: all pairs cost something, those of a single query more. A few
    # long prefills, easily disturbed, would not hold the first one down by themselves.
    decode, prefill = np.array(
        [(s.load.decode_context, s.load.prefill_pairs) for s in samples], dtype=np.float64
    ).T
    ones = np.ones(len(samples))
    others = np.stack([ones, decode + prefill, decode], axis=1)
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
    base_s, pair_s, single_s, *slopes = _robust_nonnegative(features, bends)
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
    )


def mean_error(model: LatencyModel, samples: Sequence[Sample]) -> float:
    """Mean of |predicted - measured| / measured."""
    return statistics.fmean(
        abs(model.iteration_s(sample.load) - sample.seconds) / sample.seconds for sample in samples
    )


def _knots(candidates: Sequence[int], values: npt.NDArray[np.int64]) -> tuple[int, ...]:
    """0 and the candidates with measured values on both sides."""
    return (0, *(knot for knot in candidates if values.min() <= knot < values.max()))


def _ramps(knots: tuple[int, ...], values: npt.NDArray[np.int64]) -> Floats:
    """How far each value goes into the segment behind each knot, ``[values, knots]``."""
    ends = np.array([*knots[1:], np.inf])
    starts = np.array(knots)
    ramps: Floats = np.clip(values[:, None], starts, ends) - starts
    return ramps


def _bends(features: Floats, first: int, count: int) -> Floats:
    """A row for each pair of neighbouring slopes that is zero when they are equal."""
    rows = np.zeros((count - 1, features.shape[1]))
    for index in range(count - 1):
        # In units of the largest share of an iteration that either segment has.
        left, right = first + index, first + index + 1
        weight = _BEND_COST * min(features[:, left].max(), features[:, right].max())
        rows[index, left], rows[index, right] = -weight, weight
    return rows


def _robust_nonnegative(features: Floats, bends: Floats) -> list[float]:
    """Coefficients >= 0 for which ``features`` come close to 1 and ``bends`` to 0."""
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
    # A turn frees one coefficient and may bind others again; rounding could go on for ever.
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
            # As far towards it as none falls below zero.
            x += (x[below] / (x[below] - wanted[below] + _TINY)).min() * (wanted - x)
            free &= x > _TOLERANCE
            x[~free] = 0
    x /= scale
    return x
