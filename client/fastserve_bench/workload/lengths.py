"""Lengths of jobs, limits on them, and the ratio of prompts to outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from fastserve_client.errors import WorkloadError
from numpy.typing import NDArray

Lengths: TypeAlias = Sequence[tuple[int, int]]
"""(prompt tokens, output tokens) of each job, both at least 1."""


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Limits on the jobs of a load test. ``None``: no limit.

    Raises:
        WorkloadError: a limit that no job can meet.
    """

    max_prompt_tokens: int | None = None
    max_total_tokens: int | None = None
    """Prompt and output together."""
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        # The shortest job has one token of prompt and one of output.
        for name, limit, least in (
            ("max_prompt_tokens", self.max_prompt_tokens, 1),
            ("max_total_tokens", self.max_total_tokens, 2),
            ("max_output_tokens", self.max_output_tokens, 1),
        ):
            if limit is not None and limit < least:
                raise WorkloadError(f"{name}: got {limit}; must be at least {least}")

    def allow(self, prompt_tokens: int, output_tokens: int) -> bool:
        pairs = (
            (prompt_tokens, self.max_prompt_tokens),
            (prompt_tokens + output_tokens, self.max_total_tokens),
            (output_tokens, self.max_output_tokens),
        )
        return all(limit is None or tokens <= limit for tokens, limit in pairs)


NO_LIMITS = LengthLimits()
AUTHORS_LIMITS = LengthLimits(max_prompt_tokens=1024, max_total_tokens=2048)
"""The limits of FastServe's authors for OPT-13B. OPT has no positions beyond 2048."""


def scale_lengths(lengths: Lengths, factor: float) -> Lengths:
    """Multiplies all lengths, rounds, and keeps at least 1: the same shape for a small machine.

    Raises:
        WorkloadError: a factor out of its range.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise WorkloadError(f"scale: got {factor:g}; must be a finite number above 0")
    return [
        (max(1, round(prompt * factor)), max(1, round(output * factor)))
        for prompt, output in lengths
    ]


def scale_ratio(lengths: Lengths, ratio: float, limits: LengthLimits = NO_LIMITS) -> Lengths:
    """Scales all prompts by one factor and all outputs by another (FastServe Fig. 14).

    Afterwards mean prompt / mean output is ``ratio``, as near as whole tokens allow. The mean total
    stays the same, so jobs cost the same and only the share of the prompts changes. Lengths stay at
    least 1 and are clipped to ``limits``. The factors make up for the clipping.

    Raises:
        WorkloadError: no lengths, a ratio out of its range, or one that needs jobs over the limits
            or shorter than one token.
    """
    if not (math.isfinite(ratio) and ratio > 0):
        raise WorkloadError(f"ratio: got {ratio:g}; must be a finite number above 0")
    if not lengths:
        raise WorkloadError("lengths: got none; a ratio needs at least one job length")
    prompts, outputs = np.array(lengths, dtype=np.int64).T
    mean_total = float(prompts.mean() + outputs.mean())
    mean_output = mean_total / (1 + ratio)

    longest_total = _UNLIMITED if limits.max_total_tokens is None else limits.max_total_tokens
    longest_prompt = longest_total - 1  # one token of the total is output
    if limits.max_prompt_tokens is not None:
        longest_prompt = min(longest_prompt, limits.max_prompt_tokens)
    scaled_prompts = _scale_to_mean(
        prompts, mean_total - mean_output, np.full_like(prompts, longest_prompt), ratio
    )
    longest_outputs = longest_total - scaled_prompts
    if limits.max_output_tokens is not None:
        longest_outputs = np.minimum(longest_outputs, limits.max_output_tokens)
    scaled_outputs = _scale_to_mean(outputs, mean_output, longest_outputs, ratio)
    return list(zip(scaled_prompts.tolist(), scaled_outputs.tolist(), strict=True))


# More tokens than any job has. Small enough for exact arithmetic in a double.
_UNLIMITED = 2**31
# So many halvings of [0, 2**31] find the factor to 2**-33, far below half a token.
_BISECTIONS = 64


def _scale_to_mean(
    lengths: NDArray[np.int64], mean: float, longest: NDArray[np.int64], ratio: float
) -> NDArray[np.int64]:
    """Multiplies ``lengths`` so that, clipped to 1 … ``longest``, they have this mean."""

    def scaled(factor: float) -> NDArray[np.int64]:
        clipped: NDArray[Any] = np.clip(np.rint(lengths * factor), 1, longest)
        return clipped.astype(np.int64)

    if not 1 <= mean <= longest.mean():
        raise WorkloadError(
            f"ratio: got {ratio:g}, which needs a mean length of {mean:.1f} tokens; "
            f"must leave it between 1 and {longest.mean():.1f}"
        )
    too_small, enough = 0.0, float(longest.max())
    for _ in range(_BISECTIONS):
        middle = (too_small + enough) / 2
        if scaled(middle).mean() < mean:
            too_small = middle
        else:
            enough = middle
    # Equal lengths all grow by a whole token at once. Take the nearer side of the step.
    below, above = scaled(too_small), scaled(enough)
    return below if mean - below.mean() < above.mean() - mean else above
