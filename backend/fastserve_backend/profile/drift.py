"""Correct repeated timings for spells in which the machine was slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# A spell spans more than this many timings; anything shorter is a disturbance of single timings.
_WINDOW = 10
# The machine's speed and the times are estimated alternately; a few turns suffice.
_TURNS = 6

Floats = npt.NDArray[np.float64]


def typical_seconds(timings: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Median seconds of each thing timed, at the typical speed of the machine.

    A machine that others use, or that gets hot, changes its speed for seconds at a time. All
    timings in such a spell differ from other timings of the same things by one factor, and are
    divided by it. A thing that was timed once does not help to find that factor, but is divided by
    it too.

    Args:
        timings: (number of the thing, seconds), in the order in which they were taken.
    """
    if not timings:
        return {}
    things = np.array([thing for thing, _ in timings], dtype=np.int64)
    logs = np.log(np.array([seconds for _, seconds in timings]))
    groups = {thing: np.flatnonzero(things == thing) for thing in dict.fromkeys(things.tolist())}
    repeated = np.zeros(len(logs), dtype=bool)
    for group in groups.values():
        repeated[group] = len(group) > 1
    speed = np.zeros(len(logs))
    for _ in range(_TURNS):
        residuals = logs.copy()
        for group in groups.values():
            residuals[group] -= (logs - speed)[group].mean()
        speed = _running_median(residuals, repeated)
    return {
        thing: float(np.exp(np.median((logs - speed)[group]))) for thing, group in groups.items()
    }


def _running_median(values: Floats, counts: npt.NDArray[np.bool_]) -> Floats:
    """For each value, the median of its neighbours that count. The medians' own median is 0."""
    medians = np.zeros(len(values))
    for index in range(len(values)):
        near = slice(max(0, index - _WINDOW), index + _WINDOW + 1)
        if counts[near].any():
            medians[index] = np.median(values[near][counts[near]])
    medians -= np.median(medians)
    return medians
