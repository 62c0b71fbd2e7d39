"""Roofline times: numbers worked out by hand, and properties for any load and GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.profile.hardware import HARDWARE, Hardware, find_hardware
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.roofline import (
    ATTENTION_COMPUTE_SHARE,
    HBM_SHARE,
    ITERATION_OVERHEAD_S,
    LAYER_OVERHEAD_S,
    LINEAR_COMPUTE_SHARE,
    NCCL_LATENCY_S,
    NVLINK_SHARE,
    PCIE_SHARE,
    Roofline,
)
from hypothesis import assume, given
from hypothesis import strategies as st

A100 = HARDWARE["a100-40g"]
FASTER = ("v100-32g", "a100-40g", "a100-80g", "h100", "h200")


def opt(name: str, dtype: str = "float16") -> ModelConfig:
    return load_model_config(name, load_format="dummy", dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class TinyConfig(ModelConfig):
    """4 layers of 1,000 weights, 8 channels in 4 heads on 2 KV heads, 100 words: head of 800."""

    @property
    def num_layer_parameters(self) -> int:
        return 1000

    @property
    def num_parameters(self) -> int:
        return 4 * 1000 + 800


TINY = TinyConfig(
    name="tiny",
    directory=None,
    load_format="dummy",
    architecture="tiny",
    num_layers=4,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=32,
    vocab_size=100,
    tie_word_embeddings=True,
    max_model_len=64,
    dtype="float16",
    eos_token_ids=(2,),
)

# Effective speeds: 1e6 FLOP/s in linear layers, 1e5 bytes/s of memory, 1e4 over NVLink, 1e3 over
# PCIe; 20,000 bytes of memory.
SLOW = Hardware(
    name="slow",
    tensor_flops=1e6 / LINEAR_COMPUTE_SHARE,
    hbm_bytes_s=1e5 / HBM_SHARE,
    hbm_bytes=20_000,
    pcie_bytes_s=1e3 / PCIE_SHARE,
    nvlink_bytes_s=1e4 / NVLINK_SHARE,
)
SLOW_ATTENTION_FLOPS = 1e6 / LINEAR_COMPUTE_SHARE * ATTENTION_COMPUTE_SHARE
OVERHEAD_S = ITERATION_OVERHEAD_S + 4 * LAYER_OVERHEAD_S

loads = st.builds(
    IterationLoad,
    num_tokens=st.integers(1, 4096),
    num_sampled=st.integers(0, 256),
    num_decodes=st.integers(0, 256),
    decode_context=st.integers(0, 500_000),
    prefill_pairs=st.integers(0, 4_000_000),
)
parallelism = st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (4, 4), (8, 3)])


def test_rounded_weights_are_read_faster_and_leave_room() -> None:
    """The model has 4,000 weights in layers, a head of 800, and a table of 800 in 16 bits."""
    exact, rounded = (
        Roofline(replace(TINY, quantization=quantization), SLOW) for quantization in (None, "int8")
    )
    one = IterationLoad.of([(0, 1, True)])
    # Reading 9,600 bytes, then 4,800, takes longer than 2 operations for each weight.
    assert exact.iteration_s(one) - rounded.iteration_s(one) == pytest.approx(4800 / 1e5)
    block_bytes = TINY.kv_bytes_per_block(16)
    for model, weight_bytes in ((exact, 9600), (rounded, 4800 + 1600)):
        assert model.num_device_blocks(16, 1.0) == (20_000 - weight_bytes) // block_bytes


def batch_of_16() -> IterationLoad:
    return IterationLoad.of([(399, 1, True)] * 16)


def test_a_decode_reads_all_weights_and_the_cache() -> None:
    # Weights 2 · 4,800 bytes; 64 bytes a position (4 layers, K and V, 2 heads of 2 channels).
    expected = (9600 + 10 * 64) / 1e5
    assert Roofline(TINY, SLOW).decode_s(10) == pytest.approx(OVERHEAD_S + expected)


def test_a_prefill_multiplies_every_token_with_every_layer_and_one_with_the_head() -> None:
    # 2 · 4,000 FLOP a token, more than reading from 10 tokens on; the head of one row is read.
    # 20 · 21 / 2 = 210 pairs of 4 · 4 layers · 8 channels FLOP.
    expected = 20 * 8000 / 1e6 + 1600 / 1e5 + 210 * 128 / SLOW_ATTENTION_FLOPS
    assert Roofline(TINY, SLOW).prefill_s(20) == pytest.approx(OVERHEAD_S + expected)


def test_a_chunk_that_samples_nothing_skips_the_head() -> None:
    # 20 tokens after 30: 20 · 30 + 210 pairs.
    load = IterationLoad.of([(30, 20, False)])
    expected = 20 * 8000 / 1e6 + 810 * 128 / SLOW_ATTENTION_FLOPS
    assert Roofline(TINY, SLOW).iteration_s(load) == pytest.approx(OVERHEAD_S + expected)


def test_many_sampled_rows_are_bound_by_the_heads_multiplications() -> None:
    model = Roofline(TINY, SLOW)
    load = IterationLoad(100, 50, 0, 0, 0)
    more = replace(load, num_sampled=100)
    assert model.iteration_s(more) - model.iteration_s(load) == pytest.approx(50 * 1600 / 1e6)


def test_tensor_parallelism_halves_the_work_and_adds_two_all_reduces_a_layer() -> None:
    # A GPU of two sends 2 · 1/2 of 16 bytes a token in each of 8 all-reduces.
    expected = (9600 + 10 * 64) / 2e5 + 8 * (16 / 1e4 + NCCL_LATENCY_S)
    assert Roofline(TINY, SLOW, 2).decode_s(10) == pytest.approx(OVERHEAD_S + expected)


def test_pipeline_stages_hand_over_inside_the_node_by_nvlink() -> None:
    model = Roofline(TINY, SLOW, 1, 4)
    expected = (9600 + 10 * 64) / 1e5 + 3 * (16 / 1e4 + NCCL_LATENCY_S)
    assert model.num_stages == 4
    assert model.decode_s(10) == pytest.approx(OVERHEAD_S + expected)


def test_only_hand_overs_between_nodes_take_the_network_beside_pcie() -> None:
    # 4 GPUs a stage: stages 0 and 1 share a node, 2 and 3 the next; the middle hand-over crosses.
    model = replace(TINY, num_kv_heads=4)
    slow_network = replace(SLOW, pcie_bytes_s=SLOW.pcie_bytes_s / 2)
    difference = Roofline(model, slow_network, 4, 4).decode_s(1) - Roofline(
        model, SLOW, 4, 4
    ).decode_s(1)
    assert difference == pytest.approx(16 / 500 - 16 / 1000)
    assert Roofline(model, slow_network, 4, 2).decode_s(1) == pytest.approx(
        Roofline(model, SLOW, 4, 2).decode_s(1)
    )


@pytest.mark.parametrize(
    ("parallel", "gpus"), [((1, 1), 1), ((2, 1), 2), ((1, 2), 2), ((2, 2), 4), ((1, 3), 2)]
)
def test_every_gpu_swaps_its_shard_over_its_own_link(parallel: tuple[int, int], gpus: int) -> None:
    # Three stages of 4 layers: the fullest has 2, half of the bytes.
    assert Roofline(TINY, SLOW, *parallel).swap_s(64_000) == pytest.approx(64_000 / gpus / 1e3)


def test_kv_blocks_fill_what_the_weights_leave() -> None:
    # 20,000 · 0.9 − 9,600 bytes, 16 · 64 bytes a block.
    assert Roofline(TINY, SLOW).num_device_blocks(16, 0.9) == 8400 // 1024
    # Each of two GPUs holds half of the weights and half of each block.
    assert Roofline(TINY, SLOW, 2).num_device_blocks(16, 0.9) == (18_000 - 4800) // 512
    # The middle one of three stages holds 2 layers, the last one 1 and the head: 2 · 2,000 bytes,
    # half a block.
    assert Roofline(TINY, SLOW, 1, 3).num_device_blocks(16, 0.9) == (18_000 - 4000) // 512
    # Of two stages the last has the head: 2 · 2,800 bytes.
    assert Roofline(TINY, SLOW, 1, 2).num_device_blocks(16, 0.9) == (18_000 - 5600) // 512


def test_kv_of_a_job_has_the_size_that_fastserve_states() -> None:
    # §4.2: OPT-175B, 512 tokens in and 1 out, takes 2.3 GB = 4 · 96 layers · 12,288 · 513.
    job = opt("opt-175b").kv_bytes_per_block(512 + 1)
    assert job == 4 * 96 * 12288 * 513
    assert job / 2**30 == pytest.approx(2.3, abs=0.06)


def test_more_gpus_leave_more_room_for_kv() -> None:
    model = opt("opt-66b")
    blocks = [Roofline(model, A100, gpus).num_device_blocks(16, 0.9) for gpus in (4, 8)]
    assert blocks[0] < blocks[1] / 2  # the weights' share of each GPU shrinks as well


@pytest.mark.parametrize(
    ("hardware", "decode_ms", "batch_ms", "prefill_ms"),
    [
        ("a100-40g", 26.3, 30.8, 86.5),
        ("a100-80g", 20.6, 24.1, 86.4),
        ("h100", 13.5, 15.6, 29.0),
        ("h200", 10.1, 11.6, 28.9),
    ],
)
def test_opt_13b_takes_what_the_module_states(
    hardware: str, decode_ms: float, batch_ms: float, prefill_ms: float
) -> None:
    model = Roofline(opt("opt-13b"), find_hardware(hardware))
    times = [model.decode_s(400), model.iteration_s(batch_of_16()), model.prefill_s(512)]
    assert [1e3 * s for s in times] == pytest.approx([decode_ms, batch_ms, prefill_ms], abs=0.06)


@pytest.mark.parametrize("hardware", FASTER)
def test_a_decode_takes_more_than_its_floor_by_less_than_double(hardware: str) -> None:
    model, gpu = opt("opt-13b"), find_hardware(hardware)
    moved = 2 * model.num_parameters + 16 * model.kv_bytes_per_block(400)
    ratio = Roofline(model, gpu).iteration_s(batch_of_16()) / (moved / gpu.hbm_bytes_s)
    assert 1.3 < ratio < 2.0


def test_prefill_grows_with_the_prompt_while_decode_hardly_does() -> None:
    # FastServe Fig. 5: OPT-2.7B on an A100.
    model = Roofline(opt("opt-2.7b"), A100)
    assert model.decode_s(1024) < 1.1 * model.decode_s(64)
    assert model.prefill_s(1024) > 4 * model.prefill_s(64)
    assert model.prefill_s(1024) > 4 * model.decode_s(1024)


def test_tensor_parallelism_pays_for_a_large_model_and_not_for_a_tiny_one() -> None:
    large = [Roofline(opt("opt-13b"), A100, n).decode_s(400) for n in (1, 2, 4, 8)]
    assert large == sorted(large, reverse=True)
    small = opt("opt-125m")
    assert Roofline(small, A100, 4).decode_s(400) > Roofline(small, A100).decode_s(400)


@given(loads)
def test_tensor_parallelism_never_beats_its_communication_nor_the_number_of_gpus(
    load: IterationLoad,
) -> None:
    model = opt("opt-13b")
    one, eight = Roofline(model, A100).iteration_s(load), Roofline(model, A100, 8).iteration_s(load)
    sent = 2 * 40 * 2 * 7 / 8 * model.hidden_size * 2 * load.num_tokens
    assert eight > sent / A100.nvlink_bytes_s + 80 * NCCL_LATENCY_S
    assert eight > one / 8


@given(loads, st.sampled_from([f.name for f in fields(IterationLoad)]), st.integers(1, 10_000))
def test_more_work_is_never_faster(load: IterationLoad, field: str, more: int) -> None:
    model = Roofline(opt("opt-2.7b"), A100, 2, 2)
    larger = replace(load, **{field: getattr(load, field) + more})
    assert 0 < model.iteration_s(load) <= model.iteration_s(larger)


@given(
    loads,
    parallelism,
    st.sampled_from(["tensor_flops", "hbm_bytes_s", "pcie_bytes_s", "nvlink_bytes_s"]),
    st.floats(1.0, 100.0),
)
def test_faster_hardware_is_never_slower(
    load: IterationLoad, parallel: tuple[int, int], rate: str, factor: float
) -> None:
    model = opt("opt-6.7b")
    faster = replace(A100, **{rate: getattr(A100, rate) * factor})
    slow_model, fast_model = Roofline(model, A100, *parallel), Roofline(model, faster, *parallel)
    assert fast_model.iteration_s(load) <= slow_model.iteration_s(load)
    assert fast_model.swap_s(10**9) <= slow_model.swap_s(10**9)


@given(loads, st.sampled_from(FASTER), st.sampled_from(FASTER))
def test_the_gpus_are_ordered(load: IterationLoad, one: str, other: str) -> None:
    assume(FASTER.index(one) < FASTER.index(other))
    model = opt("opt-13b")
    slow, fast = (Roofline(model, find_hardware(name)) for name in (one, other))
    assert fast.iteration_s(load) <= slow.iteration_s(load)
    assert fast.num_device_blocks(16, 0.9) >= slow.num_device_blocks(16, 0.9)


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"hardware: got 'b300'; .*a100-40g, .*h200"):
        find_hardware("b300")


@pytest.mark.parametrize(
    ("tensor_parallel", "pipeline_parallel", "message"),
    [
        (3, 1, "tensor_parallel_size: got 3; must divide the 40 heads"),
        (0, 1, "tensor_parallel_size: got 0; must be from 1 to 8"),
        (10, 1, "tensor_parallel_size: got 10; must be from 1 to 8"),
        (1, 0, "pipeline_parallel_size: got 0; must be from 1 to 40"),
        (1, 41, "pipeline_parallel_size: got 41; must be from 1 to 40"),
    ],
)
def test_a_sharding_that_does_not_divide_is_refused(
    tensor_parallel: int, pipeline_parallel: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Roofline(opt("opt-13b"), A100, tensor_parallel, pipeline_parallel)


def mixture(tokens: int) -> tuple[float, float]:
    """Seconds of a batch's decodes, and the bytes of weights that they read."""
    model = load_model_config("olmoe-1b-7b", load_format="dummy")
    overhead_s = ITERATION_OVERHEAD_S + model.num_layers * LAYER_OVERHEAD_S
    load = IterationLoad(tokens, tokens, tokens, 0, 0)  # their contexts are left out
    # Of the two tables, the input's counts as part of the layers.
    read = model.num_parameters - model.num_expert_parameters
    read += model.num_expert_parameters * (1 - (1 - 8 / 64) ** tokens)
    return Roofline(model, A100).iteration_s(load) - overhead_s, 2 * read


@pytest.mark.parametrize("tokens", [1, 4, 32])
def test_a_batch_reads_the_experts_that_it_chooses(tokens: int) -> None:
    seconds, read = mixture(tokens)
    assert seconds == pytest.approx(read / (A100.hbm_bytes_s * HBM_SHARE), rel=1e-6)


def test_a_long_prompt_multiplies_the_active_parameters() -> None:
    model = load_model_config("olmoe-1b-7b", load_format="dummy")
    roofline = Roofline(model, A100)
    more_s = roofline.iteration_s(IterationLoad(8192, 0, 0, 0, 0)) - roofline.iteration_s(
        IterationLoad(4096, 0, 0, 0, 0)
    )
    active = model.num_active_parameters - model.num_head_parameters
    flops = A100.tensor_flops * LINEAR_COMPUTE_SHARE
    assert more_s == pytest.approx(4096 * 2 * active / flops, rel=1e-3)


def test_kv_heads_must_divide_too() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 4; .* 2 KV heads of tiny"):
        Roofline(TINY, SLOW, 4)


def test_float32_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype: got 'float32'; .*float16 and bfloat16"):
        Roofline(opt("opt-13b", "float32"), A100)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="hardware: got 'a100-40g' with 40 GiB; opt-66b needs"):
        Roofline(opt("opt-66b"), A100)


def test_no_room_for_one_whole_job_is_refused() -> None:
    # Weights take 30.6 of a GPU's 40 GiB; 78% leave less than the 1.1 GiB of 2,048 tokens.
    model = Roofline(opt("opt-66b"), A100, 4)
    assert model.num_device_blocks(16, 0.9) * 16 >= 2048
    for utilization in (0.78, 0.1):
        with pytest.raises(ConfigError, match=r"hardware: got 'a100-40g'; .*needs 128; "):
            model.num_device_blocks(16, utilization)
