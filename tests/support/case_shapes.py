"""Cases of one shape, which differ in their dtype alone."""

from __future__ import annotations

from kernel_cases import Case


def but_dtype(case: Case) -> str:
    """The case without its dtype, the first of its arguments; a case may have no arguments."""
    return f"{case.operation} {case.arguments[1:]} {case.label}"
