"""Whole steps as a GPU runs them, in Triton's interpreter: kernels, work lists, padded decodes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_kernels import same_kernels_afterwards
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.partition import RankPlace
from fastserve_backend.models import attention
from fastserve_backend.models.loader import load_model
from fastserve_backend.rank_protocol.messages import Step, StepResult
from fastserve_backend.worker.graph_sizes import (
    GraphSize,
    decode_sizes,
    mixed_sizes,
    most_host_bound_tokens,
)
from fastserve_backend.worker.kv_store import allocate_kv
from fastserve_backend.worker.model_runner import LaunchedStep, ModelRunner
from fastserve_backend.worker.staging import Staging
from fastserve_backend.worker.step_inputs import StepLayout, StepLimits, WorkListInputs
from fastserve_backend.worker.step_memory import run_largest_step
from fastserve_kernels import ops
from fastserve_kernels.int8_cache import codes_and_scales, is_int8
from matrices import rounds

# Padded rows hold any values.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, BLOCKS_A_JOB = 16, 80, 18
SHORTEST = 5  # tokens of a prompt
LIMITS = StepLimits(max_jobs=5, max_tokens=288, max_model_len=BLOCKS_A_JOB * BLOCK_SIZE)
COMMON = {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 288}
MODELS: dict[str, dict[str, Any]] = {
    "opt": COMMON
    | {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "num_attention_heads": 2,
        "ffn_dim": 256,
        "do_layer_norm_before": True,
        "activation_function": "relu",
    },
    "llama, grouped heads": COMMON
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 256,
    },
    "gpt-neox, partly rotated": COMMON
    | {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "rotary_pct": 0.25,
    },
    "gemma2, windows": COMMON
    | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 256,
        "sliding_window": 20,
    },
    "qwen, mixture of experts": COMMON
    | {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}


@pytest.fixture
def gpu_kernels() -> Iterator[None]:
    with same_kernels_afterwards():
        ops.set_cpu_backend("triton")
        yield


def model_config(directory: Path, values: dict[str, Any], **formats: Any) -> Any:
    """``formats``: quantization, kv_dtype."""
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return load_model_config(str(directory), load_format="dummy", dtype="float32", **formats)


def empty_cache(config: Any, num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
    """A cache full of NaN. In INT8 the scales are NaN."""
    kv = allocate_kv(config, CPU, BLOCK_SIZE, num_blocks, 0.9)
    assert kv[0].nbytes == config.kv_bytes_per_block(BLOCK_SIZE)
    values = codes_and_scales(kv)[1] if is_int8(kv) else kv
    values.fill_(torch.nan)
    return kv


def work_list_inputs(directory: Path, name: str = "opt") -> WorkListInputs:
    config = model_config(directory, MODELS[name])
    return WorkListInputs(empty_cache(config), config, LIMITS)


def generate(
    config: Any,
    longest_prompt: int,
    device: torch.device = CPU,
    launch: Callable[[ModelRunner, Step], LaunchedStep | None] = ModelRunner.launch,
) -> list[list[int]]:
    """Greedy tokens of four jobs: whole prompts, a prompt in chunks beside decodes, and decodes of
    three and four jobs. No step is larger than the first. So on a GPU there is a graph for each,
    and few others."""
    limits = replace(LIMITS, max_tokens=SHORTEST + longest_prompt)
    kinds = config.layer_groups.kinds
    num_groups = sum(kind.num_groups for kind in kinds)
    num_blocks = num_groups * NUM_BLOCKS
    model, cache = load_model(config, device), empty_cache(config, num_blocks).to(device)
    runner = ModelRunner(model, config, cache, device, limits)
    rng = random.Random(0)
    order = iter(rng.sample(range(num_blocks), 4 * num_groups * BLOCKS_A_JOB))
    tables = [
        [list(islice(order, kind.num_groups * BLOCKS_A_JOB)) for kind in kinds] for _ in range(4)
    ]
    prompts = [
        [rng.randrange(4, 500) for _ in range(n)] for n in (SHORTEST, longest_prompt, 17, 20)
    ]
    done, outputs = [0] * 4, [[] for _ in prompts]  # type: ignore[var-annotated]

    def run(*jobs: int, chunk: tuple[int, int] | None = None) -> None:
        """``chunk``: a job and how many tokens of its prompt run, without its first token."""
        parts = [(job, outputs[job][-1:] or prompts[job][done[job] :]) for job in jobs]
        if chunk is not None:
            job, count = chunk
            parts.append((job, prompts[job][done[job] : done[job] + count]))
        in_step, first_blocks = [], []
        for job, tokens in parts:
            end = -(-(done[job] + len(tokens)) // BLOCK_SIZE)
            firsts = [kind.first_seen(done[job], BLOCK_SIZE) for kind in kinds]
            used = [
                table[kind.num_groups * first : kind.num_groups * end]
                for table, kind, first in zip(tables[job], kinds, firsts, strict=True)
            ]
            in_step.append((done[job], tokens, *used))
            first_blocks.append(firsts)
        step = Step.of(
            0,
            in_step,
            num_partial=len(parts) - len(jobs),
            first_blocks=list(zip(*first_blocks, strict=True)),
        )
        launched = launch(runner, step)
        assert launched is not None
        result = launched.answer()
        assert isinstance(result, StepResult)
        for job, token in zip(jobs, np.frombuffer(result.token_ids, dtype=np.int32), strict=True):
            outputs[job].append(int(token))
        for job, tokens in parts:
            done[job] += len(tokens)

    run(0, 1)
    run(0, 1, chunk=(3, 15))
    run(0, 1, 2, 3)
    run(1, 3, 2)
    runner.close()
    return outputs


# The longest context takes more than one split, which is slow in the interpreter. All models and
# formats run on an emulated GPU each time, see test_gpu_host.py.
@pytest.mark.parametrize(
    ("name", "longest", "formats"),
    [
        ("opt", 258, {}),
        ("llama, grouped heads", 35, {"kv_dtype": "int8"}),
        *(
            pytest.param(*case, marks=pytest.mark.repeated)
            for case in [
                ("llama, grouped heads", 19, {}),
                ("gpt-neox, partly rotated", 19, {}),
                ("gemma2, windows", 50, {}),
                ("qwen, mixture of experts", 19, {}),
                ("opt", 19, {"quantization": "int8"}),
                ("opt", 19, {"kv_dtype": "int8"}),
            ]
        ),
    ],
)
def test_tokens_are_those_of_the_cpu_kernels(
    name: str, longest: int, formats: dict[str, str], tmp_path: Path
) -> None:
    # `make test` has one layer; on the emulated GPU all.
    layers = rounds(1, many=MODELS[name]["num_hidden_layers"])
    config = model_config(tmp_path, MODELS[name] | {"num_hidden_layers": layers}, **formats)
    expected = generate(config, longest)
    with same_kernels_afterwards():
        ops.set_cpu_backend("triton")
        assert generate(config, longest) == expected
    assert len({tuple(tokens) for tokens in expected}) == 4


@pytest.mark.usefixtures("gpu_kernels")
@pytest.mark.parametrize("name", ["opt", "qwen, mixture of experts"])
@pytest.mark.parametrize("size", [GraphSize(5, 5), GraphSize(12, 4, num_prompts=3)])
def test_padding_changes_nothing(
    name: str, size: GraphSize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes alone, and beside a whole prompt and a chunk. Rows of no job are NaN from attention
    on, if attention does not write them."""
    config = model_config(tmp_path, MODELS[name])
    model, cache = load_model(config, CPU), empty_cache(config)
    cache[:4] = torch.randn(cache[:4].shape)
    monkeypatch.setattr(attention.ops, "empty", lambda shape, like: like.new_full(shape, torch.nan))
    inputs = WorkListInputs(cache, config, LIMITS)
    jobs = [(9, [7 + job], [job]) for job in range(3 if size.num_prompts == 0 else 2)]
    if size.num_prompts:
        jobs += [(0, [3, 4, 5, 6, 7], [2]), (9, [8, 9], [3])]
    layout = StepLayout.of(Step.of(0, jobs), BLOCK_SIZE)
    results = []
    for bring in (inputs.bring, lambda layout: inputs.bring_padded(layout, size)):
        tensors = bring(layout)
        hidden = model.forward(
            tensors.token_ids, tensors.positions, tensors.batch, cache.clone(), None
        )
        assert hidden is not None
        results.append(hidden[: layout.num_tokens].clone())
        assert torch.isfinite(results[-1]).all()
        assert tensors.sampled.tolist() == layout.sampled.tolist()
    assert len(hidden) == size.num_tokens
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("gpu_kernels")
def test_padded_steps_with_prompts_have_the_same_addresses(tmp_path: Path) -> None:
    inputs = work_list_inputs(tmp_path)
    size = GraphSize(30, 4, num_prompts=3)
    one = Step.of(0, [(9, [7], [0]), (20, [8], [1, 2]), (3, [4, 5, 6], [3])])
    other = Step.of(0, [(0, list(range(28)), [4, 5]), (0, [9], [6])], num_partial=1)
    addresses = []
    for step in (other, one):
        tensors = inputs.bring_padded(StepLayout.of(step, BLOCK_SIZE), size)
        of_batch = dict(vars(tensors.batch.groups[0]))
        scratch = of_batch.pop("decode_scratch")
        named = [tensors.token_ids, tensors.positions, *of_batch.values(), *vars(scratch).values()]
        addresses.append([(tensor.data_ptr(), tensor.shape) for tensor in named])
    assert addresses[0] == addresses[1]
    batch: Any = tensors.batch.groups[0]
    assert tensors.token_ids.tolist() == [7, 8, 4, 5, 6] + 25 * [0]
    assert batch.slots.tolist() == [9, 2 * BLOCK_SIZE + 4, *(3 * 16 + 3 + n for n in range(3))] + (
        25 * [-1]
    )
    assert batch.decode_contexts.tolist() == [10, 21, 0, 0]
    assert batch.context_lens.tolist() == [10, 21, 6, 0]
    assert batch.query_starts.tolist() == [0, 1, 2, 5, 5]
    assert batch.prefill_work.tolist() == [1, 2, 0, 0, 0, 0, 0]
    assert tensors.sampled.tolist() == [0, 1, 4]


@pytest.mark.usefixtures("gpu_kernels")
def test_a_step_is_padded_to_the_smallest_size_with_room(tmp_path: Path) -> None:
    inputs = work_list_inputs(tmp_path)
    assert [size.num_tokens for size in inputs.sizes] == [1, 2, 3, 4, 5, 64, 128, 192, 256, 288]

    def size_for(*tokens: int) -> GraphSize | None:
        jobs = [(0, list(range(count)), range(20)) for count in tokens]
        return inputs.prepare(Step.of(0, jobs), 0).size

    assert size_for(5) == size_for(5, 1, 58) == GraphSize(64, 5, num_prompts=5)
    assert size_for(65) == GraphSize(128, 5, num_prompts=5)
    assert size_for(289) is None
    assert size_for(*6 * [2]) is None  # more jobs than decodes have room for


def test_graphs_serve_as_many_tokens_as_the_host_would_delay() -> None:
    """Published sizes: elements of a layer, bytes of each, and the most tokens."""
    for layer, element_bytes, tokens in [
        (7e6, 2, 2048),  # OPT-125M
        (50e6, 2, 896),  # OPT-1.3B
        (201e6, 2, 192),  # OPT-6.7B
        (315e6, 2, 0),  # OPT-13B
        (315e6, 0.56, 128),  # the same in 4 bits
    ]:
        assert most_host_bound_tokens(int(layer), element_bytes) == tokens
    sizes = mixed_sizes(2048, 256)
    assert [size.num_tokens for size in sizes] == sorted({size.num_tokens for size in sizes})
    assert (sizes[0], sizes[-1]) == (GraphSize(64, 64, 10), GraphSize(2048, 256, 72))
    for smaller, larger in pairwise(sizes[7:]):
        assert larger.num_tokens <= 1.25 * smaller.num_tokens
    assert mixed_sizes(0, 256) == []


@pytest.mark.usefixtures("gpu_kernels")
def test_padded_steps_have_the_same_addresses(tmp_path: Path) -> None:
    inputs = work_list_inputs(tmp_path)
    of_two = Step.of(0, [(9, [7], [0]), (20, [8], [1, 2])])
    of_one = Step.of(0, [(280, [9], range(18))])
    addresses = []
    for step in (of_two, of_one):
        tensors = inputs.bring_padded(StepLayout.of(step, BLOCK_SIZE), GraphSize(4, 4))
        batch: Any = tensors.batch.groups[0]
        named = [tensors.token_ids, tensors.positions, batch.slots, batch.block_tables]
        named += [batch.table_starts, batch.decode_contexts, batch.decode_work]
        addresses.append([(tensor.data_ptr(), tensor.shape) for tensor in named])
    assert addresses[0] == addresses[1]
    assert tensors.token_ids.tolist() == [9, 0, 0, 0]
    assert batch.slots.tolist() == [17 * BLOCK_SIZE + 8, -1, -1, -1]
    assert batch.decode_contexts.tolist() == [281, 0, 0, 0]


@pytest.mark.usefixtures("gpu_kernels")
def test_padded_steps_have_the_same_addresses_in_each_group(tmp_path: Path) -> None:
    inputs = work_list_inputs(tmp_path, "gemma2, windows")
    of_two = Step.of(
        0,
        [(9, [7], [0], [3, 4]), (20, [8], [1, 2], [5, 6, 7, 8])],
        first_blocks=[[0, 0], [0, 0]],
    )
    # The token at 280 sees those from 261 on: in its window's groups the blocks 16 and 17.
    of_one = Step.of(0, [(280, [9], range(18), [20, 30, 21, 31])], first_blocks=[[0], [16]])
    addresses = []
    for step in (of_two, of_one):
        tensors = inputs.prepare(step, 0)
        groups: Any = tensors.batch.groups
        named = [tensor for group in groups for tensor in vars(group).values()]
        addresses.append([one.data_ptr() for one in named if isinstance(one, torch.Tensor)])
    assert addresses[0] != addresses[1]  # of two padded sizes
    tensors = inputs.bring_padded(
        StepLayout.of(of_two, BLOCK_SIZE, 0, inputs._kinds), GraphSize(2, 2)
    )
    again: Any = tensors.batch.groups
    named = [tensor for group in again for tensor in vars(group).values()]
    assert [one.data_ptr() for one in named if isinstance(one, torch.Tensor)] == addresses[0]
    last: Any = inputs.prepare(of_one, 0).batch.groups
    assert [group.slots.tolist() for group in last] == [
        [block * BLOCK_SIZE + 8] for block in (17, 21, 31)
    ]
    for group, block in zip(last, (17, 21, 31), strict=True):
        start = int(group.table_starts[0])
        assert int(group.block_tables[start + 17]) == block
    assert int(last[1].table_starts[0]) == 18 - 16


@pytest.mark.usefixtures("gpu_kernels")
def test_a_step_of_more_jobs_than_graphs_have_is_refused(tmp_path: Path) -> None:
    inputs = work_list_inputs(tmp_path)
    most = Step.of(0, [(9, [7], [job]) for job in range(LIMITS.max_jobs)])
    assert len(inputs.prepare(most, 0).token_ids) == 5
    more = Step.of(0, [(9, [7], [job]) for job in range(LIMITS.max_jobs + 1)])
    with pytest.raises(AssertionError, match="a step of 6 jobs, but 5 at most"):
        inputs.prepare(more, 0)


@pytest.mark.usefixtures("gpu_kernels")
@pytest.mark.parametrize("stage", [0, 1])
def test_largest_step_fits_the_inputs(stage: int, tmp_path: Path) -> None:
    """The step that measures peak memory runs on either stage of a pipeline."""
    config = model_config(tmp_path, MODELS["llama, grouped heads"])
    model = load_model(config, CPU, layers=range(stage, stage + 1))
    limits = StepLimits(max_jobs=3, max_tokens=40, max_model_len=32)
    cache = empty_cache(config, num_blocks=1).zero_()
    run_largest_step(model, config, cache, limits, RankPlace(stage=stage, num_stages=2))
    assert not cache.any()  # it leaves nothing behind


def test_arrays_come_whole_and_aligned_and_have_room_or_raise() -> None:
    arrays = [np.arange(5, dtype=np.int64), np.arange(3, dtype=np.int32)]
    staging = Staging(Staging.size_of(arrays), CPU)
    first = staging.bring(arrays, staging.places(arrays))
    assert [tensor.tolist() for tensor in first] == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert [tensor.dtype for tensor in first] == [torch.int64, torch.int32]
    assert all(tensor.data_ptr() % 64 == first[0].data_ptr() % 64 for tensor in first)
    shorter = [arrays[0] + 5, np.array([7], dtype=np.int32)]
    second = staging.bring(shorter, staging.places(arrays))
    assert [tensor.tolist() for tensor in second] == [[5, 6, 7, 8, 9], [7, 1, 2]]
    with pytest.raises(ValueError, match="size"):
        staging.places([np.arange(500, dtype=np.int64)])


@pytest.mark.parametrize("max_jobs", [1, 2, 5, 8, 16, 17, 100, 128, 512])
def test_sizes_of_decodes_waste_at_most_a_fourth(max_jobs: int) -> None:
    sizes = [size.num_jobs for size in decode_sizes(max_jobs)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_jobs
    for num_jobs in range(1, max_jobs + 1):
        size = next(size for size in sizes if size >= num_jobs)
        assert size - num_jobs <= num_jobs / 4
    assert len(sizes) <= 4 * max(2, max_jobs.bit_length())
