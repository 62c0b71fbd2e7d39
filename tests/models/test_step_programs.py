"""A step that runs as one recorded program has the bits of the model's Python code."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_checkpoints import POSITIONS, of_each
from decoder_checkpoints import VARIANTS as DECODERS
from divisible_models import saved as saved_divisible
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import layers_of_stages
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.loader import load_model, torch_dtype
from fastserve_backend.models.model_part import TensorGroup
from fastserve_backend.rank_protocol.messages import Step, StepResult
from fastserve_backend.worker.model_runner import ModelRunner
from fastserve_backend.worker.step_inputs import CPUInputs, StepLimits
from fastserve_backend.worker.step_program import StepProgram
from fastserve_kernels import ops
from fastserve_kernels.int8_cache import SCALE_BYTES
from opt_checkpoints import VARIANTS as OPT_VARIANTS
from opt_checkpoints import random_opt
from rank_threads import Meeting, ThreadGroup
from rotary_checkpoints import LLAMA, random_model
from rotary_checkpoints import VARIANTS as ROTARY
from torch import Tensor
from torch_threads import torch_threads
from transformers import LlamaConfig

pytestmark = pytest.mark.usefixtures("compiled_kernels")

CPU = torch.device("cpu")
BLOCK_SIZE = 4
BLOCKS_OF_A_JOB = POSITIONS // BLOCK_SIZE
LIMITS = StepLimits(max_jobs=3, max_tokens=24, max_model_len=POSITIONS)
CONFIGS: dict[str, Any] = {
    **ROTARY,
    **DECODERS,
}
MODELS = [*CONFIGS, *(f"opt_{name}" for name in OPT_VARIANTS)]

# Jobs, each with its first position and number of tokens, and how many of these go on later.
TURNS: list[tuple[list[tuple[int, int, int]], int]] = [
    ([(0, 0, 13), (1, 0, 5)], 0),
    ([(0, 13, 1), (1, 5, 1), (2, 0, 7)], 1),
    ([(2, 7, 6)], 1),
    ([(0, 14, 1), (2, 13, 7)], 0),
    ([(2, 20, 1), (0, 15, 1), (1, 6, 1)], 0),
    ([(1, 7, 1)], 0),
    ([(0, 16, 24)], 0),
]


def saved(name: str, directory: Path) -> None:
    if name in CONFIGS:
        random_model(CONFIGS[name]).save_pretrained(directory)
    else:
        random_opt(**OPT_VARIANTS[name.removeprefix("opt_")]).save_pretrained(directory)


def steps(config: ModelConfig) -> list[Step]:
    """Prompts, whole and in chunks, decodes, and both together."""
    kinds, first_group = [], 0
    for kind in config.layer_groups.kinds:
        kinds.append(range(first_group, first_group + kind.num_groups))
        first_group += kind.num_groups
    made = []
    for turn, (jobs, num_partial) in enumerate(TURNS):
        rows: list[Any] = []
        for job, start, count in jobs:
            blocks = range(-(-(start + count) // BLOCK_SIZE))
            own = [(job * BLOCKS_OF_A_JOB + block) * first_group for block in blocks]
            tables = [[block + group for block in own for group in groups] for groups in kinds]
            tokens = [(7 * job + 11 * position) % 300 for position in range(start, start + count)]
            rows.append((start, tokens, *tables))
        first_blocks = [[0] * len(rows)] * len(kinds)
        step = Step.of(turn, rows, num_partial=num_partial, first_blocks=first_blocks)
        if getattr(config, "rotary_switch", None) is not None:
            step.are_long = np.array([job == 0 for job, _, _ in jobs]).tobytes()
        made.append(step)
    return made


def empty_cache(config: ModelConfig, layers: range | None = None, ranks: int = 1) -> Tensor:
    groups = config.layer_groups
    num_blocks = 3 * BLOCKS_OF_A_JOB * len(groups.kind_of_group)
    heads, width, dtype = config.num_kv_heads // ranks, config.head_dim, torch_dtype(config)
    if config.kv_dtype == "int8":
        width, dtype = width + SCALE_BYTES, torch.int8
    depth = groups.depth(layers or range(config.num_layers))
    return torch.zeros((num_blocks, depth, 2, heads, BLOCK_SIZE, width), dtype=dtype)


def recorded(
    model: CausalLM, config: ModelConfig, kv: Tensor, *, is_first: bool = True, is_last: bool = True
) -> StepProgram:
    return StepProgram(
        model,
        kv,
        LIMITS,
        len(config.layer_groups.kind_of_group),
        width=config.hidden_size,
        dtype=torch_dtype(config),
        has_earlier_stage=not is_first,
        is_last_stage=is_last,
    )


def same(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@torch.inference_mode()
def check_steps(config: ModelConfig) -> None:
    model = load_model(config, CPU)
    kv, expected_kv = empty_cache(config), empty_cache(config)
    program = recorded(model, config, kv)
    prepare = CPUInputs(BLOCK_SIZE, config.layer_groups.kinds).prepare
    for step in steps(config):
        inputs = prepare(step, 0)
        expected = model.forward(
            inputs.token_ids, inputs.positions, inputs.batch, expected_kv, None, inputs.sampled
        )
        output = program.run(inputs, None, is_greedy=True)
        assert same(output.logits, expected)
        if expected is not None:
            assert output.greedy is not None
            assert all(map(same, output.greedy, ops.greedy_tokens(expected)))
        assert same(kv, expected_kv)
    assert kv.any()


@pytest.mark.parametrize("name", of_each(MODELS))
def test_steps_of_all_sizes(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    check_steps(load_model_config(str(tmp_path), load_format="auto", dtype="float32"))


@pytest.mark.parametrize("name", ["llama", "gemma2", "neox", "opt_base", "gpt_oss", "mixtral"])
@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"dtype": "float32", "kv_dtype": "int8"},
    ],
)
def test_number_formats(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    saved(name, tmp_path)
    check_steps(load_model_config(str(tmp_path), load_format="auto", **how))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("threads", [1, 3, 7])
def test_any_number_of_threads(threads: int, name: str, tmp_path: Path) -> None:
    """There may be more of them than cores."""
    saved(name, tmp_path)
    with torch_threads(threads):
        check_steps(load_model_config(str(tmp_path), load_format="auto", dtype="bfloat16"))


@pytest.mark.parametrize(
    "name", ["llama", "llama_uneven", "neox", "opt_350m", "gemma2", "gpt_oss", "qwen2_moe"]
)
def test_ranks_and_stages(name: str, tmp_path: Path) -> None:
    """Two ranks, as threads, in each of two stages."""
    saved_divisible(name, tmp_path)
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    prepare = CPUInputs(BLOCK_SIZE, config.layer_groups.kinds).prepare
    received: list[list[Tensor | None]] = [[None] * len(TURNS)] * 2
    for layers in layers_of_stages(config, 2):
        run = partial(_run_rank, config, layers, prepare, Meeting(2))
        with ThreadPoolExecutor(2) as pool:
            received = list(pool.map(run, range(2), received))
    first, second = received
    assert sum(logits is not None for logits in first) == len(TURNS) - 1  # one samples no row
    assert second == [None] * len(TURNS)


@torch.inference_mode()
def _run_rank(
    config: ModelConfig,
    layers: range,
    prepare: Any,
    meeting: Meeting,
    rank: int,
    received: list[Tensor | None],
) -> list[Tensor | None]:
    """What the rank computes in each step."""
    tensor: TensorGroup = ThreadGroup(rank, meeting)
    model = load_model(config, CPU, layers=layers, tensor=tensor)
    kv, expected_kv = empty_cache(config, layers, 2), empty_cache(config, layers, 2)
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers
    program = recorded(model, config, kv, is_first=is_first, is_last=is_last)
    outputs: list[Tensor | None] = []
    for step, hidden in zip(steps(config), received, strict=True):
        inputs = prepare(step, 0)
        expected = model.forward(
            inputs.token_ids, inputs.positions, inputs.batch, expected_kv, hidden, inputs.sampled
        )
        output = program.run(inputs, hidden, is_greedy=True)
        assert same(output.logits if is_last else output.hidden, expected)
        assert same(kv, expected_kv)
        outputs.append(expected)
    return outputs


def test_layers_share_memory(tmp_path: Path) -> None:
    """A program needs no more memory for more layers."""
    sizes = []
    for num_layers in (2, 6):
        directory = tmp_path / str(num_layers)
        config = LlamaConfig(**LLAMA | {"num_hidden_layers": num_layers})
        random_model(config).save_pretrained(directory)
        ours = load_model_config(str(directory), load_format="auto", dtype="float32")
        sizes.append(recorded(load_model(ours, CPU), ours, empty_cache(ours)).num_bytes)
    assert sizes[0] == sizes[1]


def test_two_runners_in_turn(tmp_path: Path) -> None:
    """Each has memory of its own, and both give the tokens of the Python code."""
    saved("llama", tmp_path)
    config = load_model_config(str(tmp_path), load_format="auto", dtype="float32")
    runners = [
        ModelRunner(
            load_model(config, CPU), config, empty_cache(config), CPU, LIMITS, may_record=one
        )
        for one in (True, True, False)
    ]
    for step in steps(config):
        tokens = [_tokens(runner, step) for runner in runners]
        assert tokens[0] == tokens[1] == tokens[2]


def _tokens(runner: ModelRunner, step: Step) -> list[int]:
    result = runner.run(step)
    assert isinstance(result, StepResult)
    return np.frombuffer(result.token_ids, dtype=np.int32).tolist()
