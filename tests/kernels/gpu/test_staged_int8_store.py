"""KV blocks go to the host and back in INT8 by the GPU's kernels."""

from __future__ import annotations

from array import array

import pytest
import torch
from fastserve_backend.worker import host_store
from fastserve_backend.worker.host_store import Int8Store, StagedInt8Store
from torch import Tensor

BLOCK_SIZE, NUM_DEVICE, NUM_HOST = 16, 12, 9
PLACES = {
    "one": ([3], [5]),
    "neighbours": ([2, 3, 4, 5], [4, 5, 6, 7]),
    "scattered": ([5, 1, 3], [0, 8, 3]),
    "host reversed": ([0, 1, 2, 3, 4], [8, 7, 6, 5, 4]),
    "runs": ([0, 1, 2, 4, 5], [2, 3, 5, 6, 7]),
}
"""Blocks in the first half of the device, and the blocks on the host."""


def make_kv(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    shape = (NUM_DEVICE, 2, 2, 1, BLOCK_SIZE, 32)
    return (torch.randn(shape) * 3 + torch.randn(shape[-1]) * 5).to(dtype)


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("staged_blocks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_as_the_store_of_a_cpu(
    places: tuple[list[int], list[int]],
    dtype: torch.dtype,
    staged_blocks: int,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources, hosts = (array("i", side) for side in places)
    targets = array("i", [NUM_DEVICE - 1 - block for block in sources])
    kv = make_kv(dtype)
    plain = Int8Store(kv, NUM_HOST)
    # The slots after the last token may hold anything.
    kv[sources[-1], ..., 5:, :] = float("nan")
    device_kv = kv.to(kernel_device)
    monkeypatch.setattr(host_store, "_STAGING_BYTES", staged_blocks * plain.block_bytes)
    staged = StagedInt8Store(device_kv, NUM_HOST)
    assert staged.block_bytes == plain.block_bytes
    assert len(staged) == len(plain) == NUM_HOST

    plain.copy_out(sources, hosts, 5)
    staged.copy_out(sources, hosts, 5)
    torch.testing.assert_close(device_kv.cpu(), kv, rtol=0, atol=0, equal_nan=True)
    # Only those blocks of the device change that are copied in.
    plain.copy_in(targets, hosts)
    staged.copy_in(targets, hosts)
    torch.testing.assert_close(device_kv.cpu(), kv, rtol=0, atol=0, equal_nan=True)
    assert not kv[list(targets)].isnan().any()


def test_another_copy_leaves_earlier_blocks(kernel_device: torch.device) -> None:
    kv = make_kv(torch.float32).to(kernel_device)
    before = kv.clone()
    store = StagedInt8Store(kv, NUM_HOST)
    store.copy_out([0, 1], [3, 4], BLOCK_SIZE)
    store.copy_out([2, 3], [5, 2], BLOCK_SIZE)
    store.copy_in([8, 9, 10, 11], [2, 3, 4, 5])
    for target, source in [(8, 3), (9, 0), (10, 1), (11, 2)]:
        # Half a step of a range of about ten standard deviations of 3.
        torch.testing.assert_close(kv[target], before[source], rtol=0.001, atol=0.08)
