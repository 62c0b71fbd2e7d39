"""Rotary position embeddings (Su et al. 2021): their frequencies, from a config.json.

Without torch: the engine's process reads configurations. ``rope_type`` and its fields are those of
Hugging Face's ``rope_parameters`` (transformers 5), or ``rope_scaling`` beside ``rope_theta``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastserve_backend.models.config import HFConfig

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rotary:
    """``angle[p, i] = p · frequencies[i]`` for the pairs (i, i + dim/2) of a head's first ``dim``
    elements."""

    dim: int
    frequencies: tuple[float, ...]
    """dim / 2 of them, radians a position."""
    scale: float
    """Factor of sine and cosine (YaRN's attention factor)."""
    max_positions: int
    """Beyond so many positions the frequencies would be others."""


def read_rotary(raw: HFConfig, head_dim: int, positions: int, *, default_share: float) -> Rotary:
    """The rotary embedding of a configuration; ``default_share`` of a head is rotated where the
    configuration does not say.

    Raises ModelError for a type that is not known or a field that is wrong.
    """
    rope = raw.mapping("rope_parameters") or raw.mapping("rope_scaling") or HFConfig({}, raw.source)
    theta = rope.number("rope_theta", raw.number("rope_theta", raw.number("rotary_emb_base", 1e4)))
    share = rope.number(
        "partial_rotary_factor",
        raw.number("partial_rotary_factor", raw.number("rotary_pct", default_share)),
    )
    kind_key = "rope_type" if "rope_type" in rope else "type"  # its name until 2024
    kind = rope.choice(kind_key, "default", _TYPES)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise raw.error("partial_rotary_factor", f"an even number of a head's {head_dim} elements")
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "yarn":
        return _yarn(frequencies, rope, theta, dim, positions)
    if kind == "linear":
        factor = rope.number("factor", None)
        frequencies = [one / factor for one in frequencies]
    elif kind == "llama3":
        frequencies = [_llama3(one, rope) for one in frequencies]
    elif kind == "dynamic":
        # Its frequencies change with each longer job; up to the trained length they are plain.
        trained = rope.integer("original_max_position_embeddings", positions)
        positions = min(positions, trained)
    return Rotary(dim, tuple(frequencies), 1.0, positions)


def _llama3(frequency: float, rope: HFConfig) -> float:
    """Llama 3.1: low frequencies are divided, high ones kept, with a ramp between."""
    factor = rope.number("factor", None)
    low, high = rope.number("low_freq_factor", None), rope.number("high_freq_factor", None)
    trained = rope.integer("original_max_position_embeddings", 8192)
    wavelength = 2 * math.pi / frequency
    if wavelength < trained / high:
        return frequency
    if wavelength > trained / low:
        return frequency / factor
    smooth = (trained / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(plain: list[float], rope: HFConfig, theta: float, dim: int, positions: int) -> Rotary:
    """YaRN (Peng et al. 2023): interpolate pairs that turn rarely, keep those that turn often."""
    trained = rope.integer("original_max_position_embeddings", positions)
    factor = rope.number("factor", positions / trained)
    beta_fast, beta_slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if rope.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    frequencies = []
    for index, one in enumerate(plain):
        interpolated = min(1.0, max(0.0, (index - low) / (high - low)))
        frequencies.append(one / factor * interpolated + one * (1 - interpolated))
    scale = rope.number("attention_factor", 0.0) or _yarn_scale(factor, rope)
    return Rotary(dim, tuple(frequencies), scale, positions)


def _yarn_scale(factor: float, rope: HFConfig) -> float:
    def part(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "mscale" in rope and "mscale_all_dim" in rope:
        return part(rope.number("mscale", None)) / part(rope.number("mscale_all_dim", None))
    return part(1.0)
