"""When jobs arrive, if the data set does not say: as a Poisson process, or in bursts."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Arrivals = Literal["poisson", "bursts", "trace"]
"""``trace``: the data set's own gaps."""

# Bursts: for so long jobs arrive at three times the mean rate, and then for so long none does.
_ON_S, _OFF_S = 10.0, 20.0


def arrival_times(gaps: NDArray[np.float64], rate: float, *, in_bursts: bool) -> list[float]:
    """Arrivals in seconds, of a Poisson process or of one that is on and off by turns.

    Args:
        gaps: exponential, of mean 1, one for each job.
        rate: jobs per second in the long run, also with bursts.
    """
    if not in_bursts:
        return (np.cumsum(gaps) / rate).tolist()  # type: ignore[no-any-return]
    period_s = _ON_S + _OFF_S
    on_s = np.cumsum(gaps) / (
        rate * period_s / _ON_S
    )  # this clock stands still while the process is off
    return (on_s // _ON_S * period_s + on_s % _ON_S).tolist()  # type: ignore[no-any-return]
