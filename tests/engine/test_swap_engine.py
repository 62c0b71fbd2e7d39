"""Copies of KV blocks to the host and back: real threads and real memory, on the CPU."""

from __future__ import annotations

import queue
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from fastserve_backend.checkpoints.model_config import DType, ModelConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.rank_protocol.messages import CopyBlocks, CopyResult
from fastserve_backend.worker.host_limits import check_swap_space, host_memory
from fastserve_backend.worker.host_store import HostStore, Int8Store, PlainStore, make_host_store
from fastserve_backend.worker.swap_engine import SwapEngine, measure_link
from fastserve_kernels.kv_quantization import dequantize, quantize
from torch import Tensor
from torch_threads import torch_threads

HostDType = Literal["same", "int8"]

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_DEVICE, NUM_HOST = 24, 30
DEADLINE_S = 30.0
STORES: list[tuple[HostDType, DType]] = [
    ("same", "float32"),
    ("same", "bfloat16"),
    ("int8", "float32"),
    ("int8", "bfloat16"),
]


def make_config(dtype: DType) -> ModelConfig:
    return ModelConfig(
        name="small",
        directory=None,
        load_format="dummy",
        architecture="opt",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=128,
        tie_word_embeddings=True,
        max_model_len=64,
        dtype=dtype,
        eos_token_ids=(),
    )


def make_kv(config: ModelConfig, num_blocks: int = NUM_DEVICE) -> Tensor:
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    return (torch.randn(shape) * 3 + torch.randn(shape[-1]) * 5).to(dtype)


def store_of(
    kv: Tensor, config: ModelConfig, host_dtype: HostDType, num_blocks: float
) -> HostStore:
    gib = num_blocks * config.host_kv_bytes_per_block(BLOCK_SIZE, host_dtype) / 2**30
    return make_host_store(config, kv, gib, host_dtype)


def kv_and_store(dtype: DType, host_dtype: HostDType) -> tuple[Tensor, HostStore]:
    config = make_config(dtype)
    kv = make_kv(config)
    return kv, store_of(kv, config, host_dtype, NUM_HOST)


def after_round_trip(
    blocks: Tensor, host_dtype: HostDType, num_last_tokens: int = BLOCK_SIZE
) -> Tensor:
    """The values that come back of blocks that were copied to the host together."""
    if host_dtype == "same":
        return blocks.clone()
    return dequantize(*quantize(blocks, num_last_tokens), blocks.dtype)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# The stores alone.


@pytest.mark.parametrize(("host_dtype", "dtype"), STORES)
@pytest.mark.parametrize("num_blocks", [0, 0.9, 1, 7, 7.9])
def test_swap_space_holds_whole_blocks(
    host_dtype: HostDType, dtype: DType, num_blocks: float
) -> None:
    config = make_config(dtype)
    kv = make_kv(config)
    store = store_of(kv, config, host_dtype, num_blocks)
    assert isinstance(store, PlainStore if host_dtype == "same" else Int8Store)
    assert len(store) == int(num_blocks)
    assert store.block_bytes == config.host_kv_bytes_per_block(BLOCK_SIZE, host_dtype)


def test_int8_holds_more_blocks() -> None:
    config = make_config("float32")
    kv = make_kv(config)
    plain = make_host_store(config, kv, 2**-10, "same")
    # INT8 takes a byte instead of 4, and 4 bytes for each channel of 16 values.
    assert len(make_host_store(config, kv, 2**-10, "int8")) == int(len(plain) * 16 * 4 / (16 + 4))


def test_more_than_the_memory_is_the_users_error() -> None:
    total_gib = host_memory().total / 2**30
    check_swap_space(total_gib / 2 - 1, CPU, num_local_ranks=2)
    with pytest.raises(ConfigError, match=r"kv_cache\.swap_space_gib: got .* GiB a rank, lower it"):
        check_swap_space(total_gib / 2 + 1, CPU, num_local_ranks=2)
    with pytest.raises(ConfigError, match=r"kv_cache\.swap_space_gib: got .* GiB, lower it"):
        check_swap_space(total_gib + 1, CPU, num_local_ranks=1)
    with pytest.raises(ConfigError, match=r"kv_cache\.swap_space_gib: got .* GiB, lower it"):
        check_swap_space(total_gib / 2, CPU, num_local_ranks=1, host_share=0.4)


PLACES = {
    "one": ([3], [5]),
    "neighbours": ([2, 3, 4, 5], [7, 8, 9, 10]),
    "scattered": ([9, 1, 5], [0, 8, 3]),
    "device reversed": ([6, 5, 4, 3], [11, 12, 13, 14]),
    "host reversed": ([3, 4, 5, 6], [14, 13, 12, 11]),
    "both reversed": ([10, 9, 8, 7], [6, 5, 4, 3]),
    "runs that break on either side": ([0, 1, 2, 3, 5, 6, 7], [5, 6, 8, 9, 10, 11, 12]),
    "first and last": ([0, 11], [0, NUM_HOST - 1]),
    "last and first": ([11, 10, 0], [NUM_HOST - 2, NUM_HOST - 1, 0]),
    "all": (list(range(12)), list(range(12))),
}
"""Blocks in the first half of the device, and the blocks on the host."""


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("host_dtype", "dtype"), STORES)
def test_blocks_come_back_to_other_places(
    host_dtype: HostDType, dtype: DType, places: tuple[list[int], list[int]]
) -> None:
    kv, store = kv_and_store(dtype, host_dtype)
    original = kv.clone()
    sources, hosts = places
    targets = [NUM_DEVICE - 1 - block for block in sources]
    expected = original.clone()
    expected[targets] = after_round_trip(original[sources], host_dtype)

    store.copy_out(sources, hosts, BLOCK_SIZE)
    assert torch.equal(kv, original)
    kv[sources] = 0.0  # their next owner writes them
    store.copy_in(targets, hosts)
    expected[sources] = 0.0
    assert torch.equal(kv, expected)

    # Copying in a second time works, as reading leaves the host's blocks as they are. Blocks go one
    # at a time, so that their order cannot matter.
    for source, host in zip(sources, hosts, strict=True):
        store.copy_in([source], [host])
    assert torch.equal(kv[sources], expected[targets])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_brings_values_back_within_half_a_step(dtype: DType) -> None:
    kv, store = kv_and_store(dtype, "int8")
    blocks = list(range(9))
    original = kv.double()
    store.copy_out(blocks, blocks, BLOCK_SIZE)
    store.copy_in(blocks, blocks)
    low, high = torch.aminmax(original[:9], dim=4, keepdim=True)
    # Half a step, the rounding of the minimum to float16, and that of the result's type.
    limit = (high - low) / 255 * 0.63 + torch.maximum(low.abs(), high.abs()) * (
        2.0**-11 + torch.finfo(kv.dtype).eps
    )
    assert ((kv[:9].double() - original[:9]).abs() <= limit).all()


@pytest.mark.parametrize("num_last_tokens", [1, 15, BLOCK_SIZE])
@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize(("host_dtype", "dtype"), STORES)
def test_only_the_very_last_block_is_partly_used(
    host_dtype: HostDType, dtype: DType, count: int, num_last_tokens: int
) -> None:
    kv, store = kv_and_store(dtype, host_dtype)
    kv[count - 1, ..., num_last_tokens:, :] = float("nan")
    blocks = list(range(count))
    original = kv.clone()
    store.copy_out(blocks, blocks, num_last_tokens)
    store.copy_in([block + 12 for block in blocks], blocks)
    expected = after_round_trip(original[:count], host_dtype, num_last_tokens)
    back = kv[12 : 12 + count]
    assert torch.equal(back[:-1], expected[:-1])
    assert torch.equal(back[-1, ..., :num_last_tokens, :], expected[-1, ..., :num_last_tokens, :])


@pytest.mark.parametrize(("host_dtype", "dtype"), STORES)
def test_the_last_block_of_each_group_is_partly_used(host_dtype: HostDType, dtype: DType) -> None:
    kv, store = kv_and_store(dtype, host_dtype)
    blocks, num_last, num_last_tokens = list(range(9)), 3, 5
    kv[6:9, ..., num_last_tokens:, :] = float("nan")
    original = kv.clone()
    store.copy_out(blocks, blocks, num_last_tokens, num_last)
    store.copy_in([block + 9 for block in blocks], blocks)
    assert torch.equal(kv[9:15], after_round_trip(original[:6], host_dtype))
    for last in (6, 7, 8):
        one = slice(last, last + 1)
        expected = after_round_trip(original[one], host_dtype, num_last_tokens)
        back = kv[last + 9, ..., :num_last_tokens, :]
        assert torch.equal(back, expected[0, ..., :num_last_tokens, :])


@pytest.mark.parametrize(("host_dtype", "dtype"), STORES)
def test_other_blocks_on_the_host_stay(host_dtype: HostDType, dtype: DType) -> None:
    config = make_config(dtype)
    kv = make_kv(config)
    store = store_of(kv, config, host_dtype, NUM_DEVICE)
    everything = list(range(NUM_DEVICE))
    store.copy_out(everything, everything, BLOCK_SIZE)
    expected = after_round_trip(kv, host_dtype)
    hosts = [4, 5, 6, 20, 1]
    kv[:5] = make_kv(config, 5)
    expected[hosts] = after_round_trip(kv[:5], host_dtype)
    store.copy_out([0, 1, 2, 3, 4], hosts, BLOCK_SIZE)
    store.copy_in(everything, everything)
    assert torch.equal(kv, expected)


# The threads.


@dataclass
class Swaps:
    """A swap engine, and the results of each of its threads."""

    kv: Tensor = field(repr=False)
    store: HostStore
    host_dtype: HostDType
    results: queue.SimpleQueue[tuple[str, CopyResult]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.engine = SwapEngine(
            self.store, CPU, send_out=self._sender("swap-out"), send_in=self._sender("swap-in")
        )

    def _sender(self, name: str) -> Callable[[CopyResult], None]:
        return lambda result: self.results.put((name, result))

    def start_copy(
        self,
        transfer_id: int,
        is_out: bool,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        num_last_tokens: int = BLOCK_SIZE,
    ) -> None:
        self.engine.start_copy(
            CopyBlocks(
                transfer_id,
                is_out,
                array("i", device_blocks).tobytes(),
                array("i", host_blocks).tobytes(),
                num_last_tokens,
            )
        )

    def result(self) -> tuple[str, CopyResult]:
        return self.results.get(timeout=DEADLINE_S)

    def finish(self, *copy: object) -> CopyResult:
        """Begins a copy and waits for it while no other copy is under way."""
        self.start_copy(*copy)  # type: ignore[arg-type]
        return self.result()[1]


@pytest.fixture(params=STORES, ids=lambda case: f"{case[0]}-{case[1]}")
def swaps(request: pytest.FixtureRequest) -> Swaps:
    host_dtype, dtype = request.param
    config = make_config(dtype)
    kv = make_kv(config)
    return Swaps(kv, store_of(kv, config, host_dtype, NUM_HOST), host_dtype)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Gives torch two threads for operations of this thread, even on a machine with one core."""
    with torch_threads(2):
        yield


def test_out_and_in_again(swaps: Swaps) -> None:
    expected = swaps.kv.clone()
    expected[[20, 21, 22]] = after_round_trip(swaps.kv[[4, 5, 6]], swaps.host_dtype)
    out = swaps.finish(1, True, [4, 5, 6], [9, 8, 7])
    assert (out.transfer_id, out.error) == (1, None)
    assert out.seconds > 0
    back = swaps.finish(2, False, [20, 21, 22], [9, 8, 7])
    assert (back.transfer_id, back.error) == (2, None)
    assert back.seconds > 0
    assert torch.equal(swaps.kv, expected)


def test_results_of_a_direction_come_in_order(swaps: Swaps) -> None:
    for index in range(40):
        # Their blocks are disjoint: no copy out touches blocks of a copy in.
        swaps.start_copy(index, True, [index % 12], [index % 15])
        swaps.start_copy(100 + index, False, [12 + index % 12], [15 + index % 15])
    ids: dict[str, list[int]] = {"swap-out": [], "swap-in": []}
    for _ in range(80):
        name, result = swaps.result()
        assert result.error is None
        ids[name].append(result.transfer_id)
    assert ids == {"swap-out": list(range(40)), "swap-in": list(range(100, 140))}


def test_of_copies_to_one_block_the_last_one_stays(swaps: Swaps) -> None:
    expected = after_round_trip(swaps.kv[19:20], swaps.host_dtype)[0]
    for index in range(20):
        swaps.start_copy(index, True, [index], [3])
    assert [swaps.result()[1].transfer_id for _ in range(20)] == list(range(20))
    assert swaps.finish(20, False, [23], [3]).error is None
    assert torch.equal(swaps.kv[23], expected)


@pytest.mark.parametrize(
    ("device_blocks", "host_blocks"),
    [
        ([1], [NUM_HOST]),
        ([1, 2], [NUM_HOST - 1, NUM_HOST]),
        ([1], [-1]),
        ([NUM_DEVICE], [1]),
        ([NUM_DEVICE - 1, NUM_DEVICE], [1, 2]),
        ([-1], [1]),
    ],
)
@pytest.mark.parametrize("is_out", [True, False], ids=["out", "in"])
def test_a_block_that_does_not_exist_fails_only_its_copy(
    swaps: Swaps, is_out: bool, device_blocks: list[int], host_blocks: list[int]
) -> None:
    original = swaps.kv.clone()
    failed = swaps.finish(1, is_out, device_blocks, host_blocks)
    assert failed.transfer_id == 1
    assert failed.error is not None
    assert failed.error.startswith("IndexError: ")
    assert torch.equal(swaps.kv, original)
    # Both threads serve the next copy.
    assert swaps.finish(2, True, [1, 2], [3, 4]).error is None
    assert swaps.finish(3, False, [5, 6], [3, 4]).error is None
    expected = after_round_trip(original[[1, 2]], swaps.host_dtype)
    assert torch.equal(swaps.kv[[5, 6]], expected)


def test_random_copies_both_ways_at_once(swaps: Swaps) -> None:
    """Compares with a model of each block's contents. As in the engine, blocks of copies under way
    are left alone."""
    rng = random.Random(5)
    kv = swaps.kv
    everything = list(range(NUM_HOST))
    for first in range(0, NUM_HOST, NUM_DEVICE):
        hosts = everything[first : first + NUM_DEVICE]
        assert swaps.finish(-1, True, range(len(hosts)), hosts).error is None
    device = {block: kv[block].clone() for block in range(NUM_DEVICE)}
    begun = after_round_trip(kv, swaps.host_dtype)
    host = {block: begun[block % NUM_DEVICE] for block in everything}
    under_way: dict[int, tuple[list[int], list[int]]] = {}
    most_under_way = 0

    def collect() -> None:
        _, result = swaps.result()
        assert result.error is None
        del under_way[result.transfer_id]

    def idle(count: int, side: int) -> list[int]:
        busy = {block for pair in under_way.values() for block in pair[side]}
        return [block for block in range(count) if block not in busy]

    for transfer_id in range(300):
        device_idle, host_idle = idle(NUM_DEVICE, 0), idle(NUM_HOST, 1)
        count = rng.randint(1, 6)
        while min(len(device_idle), len(host_idle)) < count:
            collect()
            device_idle, host_idle = idle(NUM_DEVICE, 0), idle(NUM_HOST, 1)
        # A step writes a block that no copy reads.
        written = rng.choice(device_idle)
        kv[written] = torch.rand(kv[written].shape) * rng.uniform(0.1, 20)
        device[written] = kv[written].clone()

        def choose(idle_blocks: list[int], count: int) -> list[int]:
            if rng.random() < 0.5:
                return rng.sample(idle_blocks, count)
            first = rng.randrange(len(idle_blocks) - count + 1)
            return idle_blocks[first : first + count]

        devices, hosts = choose(device_idle, count), choose(host_idle, count)
        is_out = rng.random() < 0.5
        num_last_tokens = rng.randint(1, BLOCK_SIZE)
        if is_out:
            blocks = torch.stack([device[block] for block in devices])
            back = after_round_trip(blocks, swaps.host_dtype, num_last_tokens)
            host.update(zip(hosts, back, strict=True))
        else:
            device.update({d: host[h].clone() for d, h in zip(devices, hosts, strict=True)})
        under_way[transfer_id] = (devices, hosts)
        most_under_way = max(most_under_way, len(under_way))
        swaps.start_copy(transfer_id, is_out, devices, hosts, num_last_tokens)
    while under_way:
        collect()
    assert most_under_way >= 3

    for block, expected in device.items():
        assert torch.equal(kv[block], expected), f"device block {block}"
    for first in range(0, NUM_HOST, NUM_DEVICE):
        hosts = everything[first : first + NUM_DEVICE]
        assert swaps.finish(-2, False, range(len(hosts)), hosts).error is None
        for place, block in enumerate(hosts):
            assert torch.equal(kv[place], host[block]), f"host block {block}"


def test_the_model_keeps_its_threads(two_threads: None) -> None:
    """Each copy takes one torch thread; operations in this thread still use two."""
    config = make_config("float32")
    kv = make_kv(config)
    before = torch.get_num_threads()
    swaps = Swaps(kv, store_of(kv, config, "int8", NUM_HOST), "int8")
    assert swaps.finish(1, True, range(8), range(8)).error is None
    assert swaps.finish(2, False, range(8), range(8)).error is None
    assert torch.get_num_threads() == before

    # The swap engine's threads wait, so the time of other threads is that of torch's second thread.
    # Processor time is used, so that a busy machine does not matter. The system counts that of
    # other threads a few ms late.
    values = torch.rand(500_000)
    started_own, started_all = time.thread_time(), time.process_time()
    while (own := time.thread_time() - started_own) < 0.1:
        values.sin()
    others = time.process_time() - started_all - own
    assert others > own / 4


@pytest.mark.parametrize(("host_dtype", "dtype"), STORES)
def test_link_is_measured(host_dtype: HostDType, dtype: DType) -> None:
    kv, store = kv_and_store(dtype, host_dtype)
    began_s = time.perf_counter()
    out_s, in_s = measure_link(store, len(kv), BLOCK_SIZE, CPU)
    assert min(out_s, in_s) > 0
    assert out_s + in_s < time.perf_counter() - began_s


@pytest.mark.parametrize(("host_dtype", "dtype"), STORES)
def test_without_host_blocks_there_is_no_link(host_dtype: HostDType, dtype: DType) -> None:
    config = make_config(dtype)
    kv = make_kv(config)
    original = kv.clone()
    assert measure_link(store_of(kv, config, host_dtype, 0), len(kv), BLOCK_SIZE, CPU) == (0, 0)
    assert torch.equal(kv, original)


def test_a_closed_engine_has_no_copy_under_way(swaps: Swaps) -> None:
    for index in range(50):
        swaps.start_copy(index, True, list(range(12)), list(range(12)))
    swaps.engine.close()
    num_ended = swaps.results.qsize()
    swaps.store.close()
    assert not any(thread.is_alive() for thread in swaps.engine._threads)
    assert swaps.results.qsize() == num_ended
