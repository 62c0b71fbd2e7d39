"""How the router of a mixture turns scores into choices and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """What routers differ in, beside their numbers of experts.

    scoring: turns the scores of a token into weights: their softmax, or the logistic function of
        each (DeepSeek-V3, 2024).
    renormalises: the weights of the chosen experts are divided by their sum.
    groups, chosen_groups: experts are in `groups` groups of neighbours, of one size. A token
        chooses experts of the `chosen_groups` groups whose two highest keys have the highest sums.
        A key is a weight, plus the expert's bias if the router has one.
    factor: of the weights, at the end.
    margin: None: the keys decide, as above. Otherwise SparseMixer's rule (Phi-3.5-MoE, Liu et al.
        2024), which needs softmax alone: the weight of each chosen score is its part of the softmax
        of those scores not chosen yet whose relative distance from it is at most this.
    """

    scoring: Scoring = "softmax"
    renormalises: bool = True
    groups: int = 1
    chosen_groups: int = 1
    factor: float = 1.0
    margin: float | None = None
