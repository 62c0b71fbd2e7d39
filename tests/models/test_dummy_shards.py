"""Parts of random weights are parts of the same whole tensors, even of those larger than the
pool."""

from __future__ import annotations

import pytest
import torch
from fastserve_backend.models import weights
from fastserve_backend.models.weights import Parameter, Shard, dummy_tensors
from torch import Tensor


def read(shape: tuple[int, ...], shard: Shard, *, is_scale: bool = False) -> Tensor:
    parameter = Parameter(shape, lambda tensor: None, shard, is_scale)
    (stored,) = dummy_tensors({"some.weight": parameter}, 10**9, torch.float32)
    return stored.read(shard)


@pytest.mark.parametrize("shape", [(40, 9), (300, 11)], ids=["within", "beyond"])
@pytest.mark.parametrize(
    "shard",
    [
        (slice(0, 20), slice(0, 9)),
        (slice(17, 40),),
        (slice(0, 40), slice(3, 5)),
        (slice(11, 30), slice(1, 9)),
    ],
    ids=str,
)
def test_a_part_is_what_the_whole_has_there(
    shape: tuple[int, ...], shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_DUMMY_POOL", 1009)
    for is_scale in (False, True):
        whole = read(shape, (), is_scale=is_scale)
        assert whole.shape == shape
        assert torch.equal(read(shape, shard, is_scale=is_scale), whole[shard])


def test_on_another_device_each_tensor_has_memory_of_its_own() -> None:
    """Views of one small pool would all fit a GPU's cache, and be read too fast."""
    shapes = {"one": (30, 4), "other": (20, 5)}
    parameters = {
        name: Parameter(shape, lambda tensor: None, (slice(0, 10),))
        for name, shape in shapes.items()
    }
    stored = dummy_tensors(parameters, 10**9, torch.float32, torch.device("meta"))
    tensors = [one.read((slice(0, 10),)) for one in stored]
    assert [one.device.type for one in tensors] == ["meta", "meta"]
    assert [one.untyped_storage().nbytes() for one in tensors] == [10 * 4 * 4, 10 * 5 * 4]
