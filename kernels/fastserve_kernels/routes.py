"""Which experts of a mixture compute which tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """The tokens' choices, sorted by expert: each choice is a row of the experts' products.

    tokens: int32 [R], the token of each row. R is the number of choices of all tokens.
    starts: int32 [experts + 1]. The rows from starts[e] up to starts[e + 1] are those of expert e.
        Rows from starts[-1] on are choices of experts that other ranks have.
    places: int32 [T, choices], the row of each choice.
    """

    tokens: Tensor
    starts: Tensor
    places: Tensor
