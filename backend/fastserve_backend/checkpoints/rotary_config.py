"""Reads the frequencies of rotary position embeddings (Su et al. 2021) from a config.json.

``rope_type`` and its fields are in Hugging Face's ``rope_parameters`` (transformers 5), or in
``rope_scaling`` with ``rope_theta`` beside it. Imports no torch, because the engine's process reads
configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import truediv

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.limits import check, most_of_field

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# The first is the type's name until 2024. The second rotates by three positions of an image's part,
# which are equal for text.
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
_OBJECTS = ("rope_parameters", "rope_scaling")  # the name since transformers 5, and the one before


@dataclass(frozen=True)
class Rotary:
    """Position p rotates the pair (i, i + dim/2) of a head by the angle ``p · frequencies[i]``.
    Only the head's first ``dim`` elements are rotated."""

    dim: int
    frequencies: tuple[float, ...]
    """dim / 2 numbers, in radians a position."""
    scale: float
    """A factor for sines and cosines (YaRN's attention factor)."""
    max_positions: int
    """Beyond so many positions other frequencies would apply."""
    switch: int | None = None
    """A job of more tokens is rotated by ``long_frequencies``, from its first token on."""
    long_frequencies: tuple[float, ...] = ()
    query_growth: tuple[float, int] | None = None
    """(b, n): the query at position p is multiplied by 1 + b · ln(1 + floor(p / n)), so that scores
    stay sharp in long contexts (Llama 4, Ministral 3)."""


Field = tuple[str, float]
"""The name of an architecture's own field, and its default."""


def read_rotary(
    raw: HFConfig, head_dim: int, positions: int, *, theta: Field, share: Field
) -> Rotary:
    """The rotary embedding of a configuration.

    A configuration may have ``rope_parameters`` and, for older programs, ``rope_scaling``. Both
    must then describe the same rotation.

    Args:
        theta: the field with the base of the frequencies; ``rope_parameters`` overrides it.
        share: the field with the share of a head that is rotated; likewise.

    Raises:
        ModelError: the type is unknown or a field is wrong.
    """
    ropes = [rope for key in _OBJECTS if (rope := raw.mapping(key)) is not None]
    ropes = ropes or [HFConfig({}, raw.source)]

    def stated(rope: HFConfig, name: str, own: Field) -> float:
        """The value in this object, else in the architecture's field, else in the other object."""
        key, default = own
        for fields, field in ((rope, name), (raw, key), *((other, name) for other in ropes)):
            if field in fields:
                return fields.number(field, None)
        return default

    rotary, *others = [
        _read_rope(
            raw,
            rope,
            head_dim,
            positions,
            theta=stated(rope, "rope_theta", theta),
            share=stated(rope, "partial_rotary_factor", share),
        )
        for rope in ropes
    ]
    if any(other != rotary for other in others):
        first, second = _OBJECTS
        raise raw.error(second, f"the same rotation as in {first}, or one of them alone")
    return rotary


def read_rotary_by_type(
    raw: HFConfig, head_dim: int, positions: int, thetas: Mapping[str, Field]
) -> dict[str, Rotary]:
    """The rotary embedding of each type of layer, for models whose types differ.

    ``rope_parameters`` has an object for each type (transformers 5). Before that, ``rope_scaling``
    counted for the layers of type "full_attention".

    Args:
        thetas: for each type the field with the base of its frequencies.

    Raises:
        ModelError: the type of a rotation is unknown or a field is wrong.
    """
    whole = raw.mapping(_OBJECTS[0]) or HFConfig({}, raw.source)
    before = raw.mapping(_OBJECTS[1]) or HFConfig({}, raw.source)
    is_by_type = any(name in whole for name in thetas)
    rotaries = {}
    for name, (field, default) in thetas.items():
        rope = whole.mapping(name) if is_by_type else whole
        if not is_by_type and name == "full_attention" and before:
            rope = before
        rope = rope or HFConfig({}, raw.source)
        theta = rope.number("rope_theta", raw.number(field, default))
        rotaries[name] = _read_rope(raw, rope, head_dim, positions, theta=theta, share=1.0)
    return rotaries


def _read_rope(
    raw: HFConfig, rope: HFConfig, head_dim: int, positions: int, *, theta: float, share: float
) -> Rotary:
    kind_key = "rope_type" if "rope_type" in rope else "type"  # its name until 2024
    kind = rope.choice(kind_key, "default", (*_TYPES, *_OTHER_NAMES))
    kind = _OTHER_NAMES.get(kind, kind)
    dim = int(head_dim * share)
    if theta <= 1:
        raise ModelError(f"{raw.source}: rope_theta is {theta:g}, expected a number above 1")
    # A dim beyond the head would reach into the next one in memory.
    if not 2 <= dim <= head_dim or dim % 2:
        raise ModelError(
            f"{raw.source}: partial_rotary_factor (rotary_pct) is {share:g}, expected a share of a "
            f"head's {head_dim} elements that is an even number of them"
        )
    # The configuration's own field counts first (as in transformers).
    trained_key = "original_max_position_embeddings"
    trained = raw.integer(trained_key, rope.integer(trained_key, positions))
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "yarn":
        rotary = _yarn(frequencies, rope, theta, dim, positions, trained)
        beta = rope.number_or_zero("llama_4_scaling_beta")
        return replace(rotary, query_growth=(beta, trained)) if beta else rotary
    if kind == "longrope":
        return _longrope(frequencies, rope, positions, trained)
    if kind == "linear":
        factor = rope.number("factor", None)
        frequencies = [one / factor for one in frequencies]
    elif kind == "llama3":
        frequencies = [_llama3(one, rope, trained) for one in frequencies]
    elif kind == "dynamic":
        # Its frequencies change with the job's length; up to the trained length they are plain.
        positions = min(positions, trained)
    return Rotary(dim, tuple(frequencies), 1.0, positions)


def _llama3(frequency: float, rope: HFConfig, trained: int) -> float:
    """Llama 3.1's scaling: divide low frequencies, keep high ones, with a ramp between."""
    factor = rope.number("factor", None)
    low, high = rope.number("low_freq_factor", None), rope.number("high_freq_factor", None)
    wavelength = 2 * math.pi / frequency
    if wavelength < trained / high:
        return frequency
    if wavelength >= trained / low:
        return frequency / factor
    smooth = (trained / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(
    plain: list[float], rope: HFConfig, theta: float, dim: int, positions: int, trained: int
) -> Rotary:
    """YaRN (Peng et al. 2023): interpolate pairs that turn rarely, keep those that turn often. The
    context is ``factor`` times as long as the trained one. Model cards (Qwen's) tell users to add
    that object and nothing else, so ``positions`` may be less."""
    factor = rope.number("factor", positions / trained)
    key = "max_position_embeddings"
    extended = check(f"{rope.source}: {key} by YaRN", round(factor * trained), most_of_field(key))
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
    return Rotary(dim, tuple(frequencies), scale, max(positions, extended))


def _longrope(plain: list[float], rope: HFConfig, positions: int, trained: int) -> Rotary:
    """LongRoPE (Ding et al. 2024) divides each frequency by a factor of its own. A job of more than
    ``trained`` tokens has other factors."""
    factor = rope.number("factor", positions / trained)
    scale = rope.number("attention_factor", 0.0)
    if not scale:
        if trained < 2:  # its logarithm would be 0
            key = "original_max_position_embeddings"
            raise ModelError(f"{rope.source}: {key} is {trained}, expected at least 2")
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    short, long = (
        tuple(map(truediv, plain, rope.numbers(name, len(plain))))
        for name in ("short_factor", "long_factor")
    )
    if positions <= trained:
        return Rotary(2 * len(plain), short, scale, positions)
    return Rotary(2 * len(plain), short, scale, positions, trained, long)


def _yarn_scale(factor: float, rope: HFConfig) -> float:
    def part(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, of_all = rope.number_or_zero("mscale"), rope.number_or_zero("mscale_all_dim")
    if mscale and of_all:  # 0 counts as missing, as in transformers
        return part(mscale) / part(of_all)
    return part(1.0)
