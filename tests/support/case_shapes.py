"""Cases of one shape, which differ in their dtype or their epilogue alone."""

from __future__ import annotations

from kernel_cases import Case


def but_dtype(case: Case) -> str:
    """The case without its dtype, the first of its arguments; a case may have no arguments."""
    return f"{case.operation} {case.arguments[1:]} {case.label}"


def size_of_linear(case: Case) -> str:
    """A linear's case without its dtype and without what follows the product: bias, ReLU."""
    return f"{case.operation} {case.arguments[1:4]}"
