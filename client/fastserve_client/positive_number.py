"""Reads the numbers that weights, shares and times are."""

from __future__ import annotations

import math


def positive_number(text: str) -> float | None:
    """The finite number above 0 that ``text`` says; None if it says none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
