"""What benchmarks/weight_quality.py writes and counts."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import random_llama, write_llama

from benchmarks import weight_quality
from benchmarks.weight_quality import Scores, Text


def test_a_requantized_file_differs_in_the_type_of_its_matrices_alone(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source.gguf", random_llama())
    target = tmp_path / "target.gguf"
    weight_quality.write_requantized(source, GGMLQuantizationType.Q5_1, target)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    assert {name: field.contents() for name, field in after.fields.items()} == {
        name: field.contents() for name, field in before.fields.items()
    }
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.name == old.name
        exact = gguf.dequantize(old.data, old.tensor_type)
        error = np.abs(gguf.dequantize(new.data, new.tensor_type) - exact).max()
        if len(old.shape) > 1 and old.name != "token_embd.weight":
            assert new.tensor_type == GGMLQuantizationType.Q5_1
            # 32 levels between the least and the most of 32 values.
            assert 0 < error <= np.ptp(exact) / 32
        else:
            assert new.tensor_type == old.tensor_type
            assert error == 0


def test_scores_are_of_the_next_tokens() -> None:
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        """Finds the next number twice as likely as each of the three others."""
        logits = torch.zeros(len(tokens), 4)
        logits[torch.arange(len(tokens)), (tokens + 1) % 4] = math.log(2)
        return logits

    counting, halting = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 2])
    whole, end = slice(None), slice(2, None)
    found = weight_quality.scores(forward, [Text(counting, whole), Text(halting, end)])
    assert found.likeliest.tolist() == [1, 2, 3, 3]
    assert found.loss == pytest.approx((math.log(5 / 2) + math.log(5)) / 2)


def test_a_row_compares_with_the_reference() -> None:
    exact = [Scores(math.log(10), torch.tensor([1, 2, 3, 4])), Scores(0.0, torch.tensor([1, 2]))]
    mine = [Scores(math.log(11), torch.tensor([1, 2, 3, 5])), Scores(0.0, torch.tensor([1, 2]))]
    assert weight_quality.row("Q4_0, as_stored", mine, exact) == [
        "Q4_0, as_stored", "11.000", "+10.00%", "75.0%", "100.0%",
    ]  # fmt: skip
