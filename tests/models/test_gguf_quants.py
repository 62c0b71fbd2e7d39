"""GGUF's types of few bits are read as the `gguf` library dequantizes them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from fastserve_backend.checkpoints.gguf_index import KEPT_TYPES
from fastserve_backend.models.gguf_quants import QUANTS
from gguf_files import Blocks


def test_all_types_that_are_kept_are_known() -> None:
    assert set(QUANTS) == set(KEPT_TYPES)
    for kind, quant in QUANTS.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert sizes == (quant.columns, quant.num_bytes)


@pytest.mark.parametrize("kind", KEPT_TYPES)
def test_values_are_exactly_the_librarys(kind: str) -> None:
    quant = QUANTS[kind]
    stored = Blocks.random(kind, 37, 5 * quant.columns, size=1.0)
    blocks = torch.from_numpy(stored.data).unflatten(1, (5, quant.num_bytes))
    weight = quant.weight(kind, blocks)
    assert weight.format == kind
    assert int(weight.codes.max()) == (24 if kind == "MXFP4" else 2**weight.bits - 1)
    got = weight.dequantized(torch.float32).numpy()
    assert np.array_equal(got, stored.dequantized())
    part = weight.part(torch.tensor([3, 36, 0]), slice(quant.columns, 3 * quant.columns))
    expected = stored.dequantized()[[3, 36, 0], quant.columns : 3 * quant.columns]
    assert np.array_equal(part.dequantized(torch.float32).numpy(), expected)
