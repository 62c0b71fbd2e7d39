"""Take the machine's slow spells out of repeated timings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# A spell is told from a single disturbance by so many timings before and after.
_WINDOW = 10
# Speed and times are estimated in turns; the estimates settle in a few.
_TURNS = 6

Floats = npt.NDArray[np.float64]


def typical_seconds(timings: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Median seconds of each thing timed, at the typical speed of the machine meanwhile.

    ``timings`` are (number of the thing, seconds) in the order in which they were taken. A machine
    that others use, or that gets hot, changes its speed for seconds at a time: then all that is
    timed in such a spell differs from its other repeats by the same factor, and is divided by it.
    What is timed once says nothing about spells, but is divided like its neighbours.
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
    """Over those that count among the neighbours of each; around 0 as a whole."""
    medians = np.zeros(len(values))
    for index in range(len(values)):
        near = slice(max(0, index - _WINDOW), index + _WINDOW + 1)
        if counts[near].any():
            medians[index] = np.median(values[near][counts[near]])
    medians -= np.median(medians)
    return medians
