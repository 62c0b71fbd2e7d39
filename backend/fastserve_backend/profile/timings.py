"""What repeated timings of the same steps tell: how long each takes, and whether others disturb."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Waits of this share of the time show that other processes compute. On two cores, ranks before all
# others waited for 3 to 5% of it, and ranks beside six busy processes for half.
_BUSY_WAITS = 0.15
# On a quiet machine, the two shortest timings of a step differ by 1 to 4% in the median of all
# steps.
_SCATTER = 0.15


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed step."""

    mix: int
    """Its number."""
    wall_s: float
    waited_s: float
    """Part of it in which the ranks waited for cores."""

    @property
    def own_s(self) -> float:
        """The time without the waits; > 0."""
        return self.wall_s - self.waited_s


def shortest_seconds(timings: Sequence[Timing]) -> dict[int, float]:
    """The shortest time of each mix, without waits for cores.

    Other processes only make steps longer, never shorter.
    """
    seconds: dict[int, float] = {}
    for timing in timings:
        seconds[timing.mix] = min(timing.own_s, seconds.get(timing.mix, timing.own_s))
    return seconds


def scatter(timings: Sequence[Timing]) -> float:
    """By what share the second shortest time of a mix is longer than its shortest: the median of
    all mixes that were timed twice or more; 0 if there is none."""
    of_mix: dict[int, list[float]] = {}
    for timing in timings:
        of_mix.setdefault(timing.mix, []).append(timing.own_s)
    pairs = [sorted(times)[:2] for times in of_mix.values() if len(times) > 1]
    return statistics.median(second / first - 1 for first, second in pairs) if pairs else 0.0


def do_scatter(timings: Sequence[Timing]) -> bool:
    """Whether more timings are worth their time: most of the shortest ones stand alone."""
    return scatter(timings) > _SCATTER


def show_load(warm_up: Sequence[Timing], timings: Sequence[Timing]) -> bool:
    """Whether other processes used the cores meanwhile.

    Args:
        warm_up: the first timings of mixes. They are longer anyway, so only their waits tell.
    """
    wall_s = sum(timing.wall_s for timing in (*warm_up, *timings))
    waited_s = sum(timing.waited_s for timing in (*warm_up, *timings))
    return waited_s > _BUSY_WAITS * wall_s or do_scatter(timings)
