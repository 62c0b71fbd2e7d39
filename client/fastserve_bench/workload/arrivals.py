"""When jobs arrive, if no data set says so: evenly at random, or in bursts."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Arrivals = Literal["poisson", "bursts", "trace"]
"""``trace``: the gaps that the data set has of its own."""

# Bursts: so long jobs arrive at three times the mean rate, and then so long none does.
_ON_S, _OFF_S = 10.0, 20.0


def arrival_times(gaps: NDArray[np.float64], rate: float, *, in_bursts: bool) -> list[float]:
    """Arrivals in seconds, of a Poisson process or of one that is on and off in turn.

    Args:
        gaps: exponential, of mean 1, one for each job.
        rate: jobs per second in the long run, also with bursts.
    """
    if not in_bursts:
        return (np.cumsum(gaps) / rate).tolist()  # type: ignore[no-any-return]
    period_s = _ON_S + _OFF_S
    on_s = np.cumsum(gaps) / (rate * period_s / _ON_S)  # on a clock that stands still when off
    return (on_s // _ON_S * period_s + on_s % _ON_S).tolist()  # type: ignore[no-any-return]
