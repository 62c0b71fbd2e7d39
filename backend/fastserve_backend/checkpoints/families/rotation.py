"""The usual way in which a config.json describes its rotation."""

from __future__ import annotations

from collections.abc import Mapping

from fastserve_backend.checkpoints.decoder_config import Sizes
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.rotary_config import Rotary, read_rotary


def with_default_rope(raw: HFConfig, rope: Mapping[str, object]) -> HFConfig:
    """The same fields, and this rotation if they describe none."""
    return raw if "rope_scaling" in raw else raw.with_default("rope_parameters", rope)


def whole_rotary(raw: HFConfig, sizes: Sizes, *, theta: float = 1e4) -> Rotary:
    """The rotation of whole heads.

    Args:
        theta: the family's default for ``rope_theta``.

    Raises:
        ModelError: only a part of a head is to be rotated, or a field is wrong.
    """
    rotary = partial_rotary(raw, sizes, theta=theta, share=1.0)
    if rotary.dim != sizes.head_dim:  # no version of transformers runs such a model correctly
        raise ModelError(
            f"{raw.source}: partial_rotary_factor asks for a rotation of {rotary.dim} of a "
            f"head's {sizes.head_dim} elements, but models of this family rotate them all"
        )
    return rotary


def partial_rotary(raw: HFConfig, sizes: Sizes, *, theta: float = 1e4, share: float) -> Rotary:
    """The rotation of the first elements of each head.

    Args:
        share: the family's default for ``partial_rotary_factor``.
    """
    return read_rotary(
        raw,
        sizes.head_dim,
        sizes.positions,
        theta=("rope_theta", theta),
        share=("partial_rotary_factor", share),
    )
