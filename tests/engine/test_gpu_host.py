"""The host's work for a GPU, on an emulated one: tensors are on the right device, graphs compute
anew at each replay, and the host never waits while it launches a step or begins a copy."""

from __future__ import annotations

import gc
import queue
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import job_steps
import numpy as np
import pytest
import torch
from emulated_gpu import DEVICE, EmulatedGPU, emulated_gpu
from fastserve_backend.checkpoints.partition import RankPlace, layers_of_stages
from fastserve_backend.models.loader import load_model
from fastserve_backend.models.model_part import ALONE
from fastserve_backend.rank_protocol.messages import CopyBlocks, CopyResult, PromptRows, Step
from fastserve_backend.worker import prompt_scores, step_inputs
from fastserve_backend.worker.graph_sizes import GraphSize
from fastserve_backend.worker.host_store import HostStore, PlainStore, StagedInt8Store
from fastserve_backend.worker.model_runner import ModelRunner
from fastserve_backend.worker.pipeline import Pipeline
from fastserve_backend.worker.step_inputs import StepLimits
from fastserve_backend.worker.step_memory import run_largest_step, step_bytes
from fastserve_backend.worker.swap_engine import SwapEngine, copy_blocks
from fastserve_kernels.gpu import activations
from fastserve_kernels.gpu import paged_decode as gpu_decode
from fastserve_kernels.kv_quantization import dequantize, quantize
from job_steps import TURNS, run_turns
from test_gpu_steps import CPU, MODELS, empty_cache, generate, model_config
from torch.testing._internal.distributed.fake_pg import FakeStore
from waiting import DEADLINE_S

# Padded rows hold any values.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
LIMITS = StepLimits(max_jobs=5, max_tokens=32, max_model_len=32)


def launch(gpu: EmulatedGPU, runner: ModelRunner, step: Step) -> Any:
    gpu.waits.clear()
    launched = runner.launch(step)
    assert gpu.waits == []
    return launched


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        *((name, {}) for name in MODELS),
        ("opt", {"quantization": "int8"}),
        ("opt", {"kv_dtype": "int8"}),
        ("llama, grouped heads", {"kv_dtype": "int8"}),
    ],
)
def test_prompts_chunks_and_decodes(
    name: str, formats: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is padded and replays a graph: decodes that of four, the others that of the
    largest step."""
    config = model_config(tmp_path, MODELS[name], **formats)
    longest = 30 if "windows" in name else 19
    monkeypatch.setattr(step_inputs, "decode_sizes", lambda max_jobs: [GraphSize(4, 4)])
    with emulated_gpu() as gpu:
        found = generate(config, longest, DEVICE, partial(launch, gpu))
        assert gpu.num_replays == 4
    assert found == generate(config, longest)


@pytest.mark.parametrize("masked", [False, True])
def test_steps_sent_ahead_with_tokens_chosen_at_random(
    masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without masks, steps with prompts are launched kernel by kernel."""
    config = model_config(tmp_path, MODELS["opt"])
    if not masked:
        monkeypatch.setattr(step_inputs, "most_host_bound_tokens", lambda *_: 0)
    vocab = config.vocab_size if masked else None

    def tokens(device: torch.device, start: Callable[[ModelRunner, Step], Any]) -> list[bytes]:
        cache = empty_cache(config, job_steps.NUM_BLOCKS).to(device)
        runner = ModelRunner(load_model(config, device), config, cache, device, LIMITS)
        results = run_turns(lambda step: start(runner, step).answer, ahead=True, masked_vocab=vocab)
        runner.close()
        return [result.token_ids for result in results]

    with emulated_gpu() as gpu:
        found = tokens(DEVICE, partial(launch, gpu))
        mixed = sum(not turn.decoding or bool(turn.ending or turn.chunk) for turn in TURNS)
        assert gpu.num_replays == len(TURNS) - (0 if masked else mixed)
    assert found == tokens(CPU, ModelRunner.launch)


@pytest.mark.parametrize("rows_at_once", [3, 100])
def test_log_probabilities_of_prompts(
    rows_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt from its fifth token on, and of a chunk of another."""
    config = model_config(tmp_path, MODELS["opt"])
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", rows_at_once * config.vocab_size)
    ids = np.arange(10, 40, dtype=np.int32)
    step = Step.of(
        0, [(0, ids[:20].tolist(), [4, 7]), (0, ids[20:29].tolist(), [1])], num_partial=1
    )
    step.prompt_rows = [
        PromptRows(job=0, first_row=4, token_ids=ids[5:20].tobytes(), num_top=2),
        PromptRows(job=1, first_row=20, token_ids=ids[21:30].tobytes(), num_top=0),
    ]

    def scores(device: torch.device, start: Callable[[ModelRunner, Step], Any]) -> list[Any]:
        cache = empty_cache(config, job_steps.NUM_BLOCKS).to(device)
        runner = ModelRunner(load_model(config, device), config, cache, device, LIMITS)
        result = start(runner, step).answer()
        runner.close()
        of_prompts = result.prompt_scores
        return [
            np.frombuffer(b"".join(one.logprobs for one in of_prompts), np.float32),
            np.frombuffer(of_prompts[0].top_logprobs, np.float32).reshape(15, 2),
            np.frombuffer(of_prompts[0].top_ids, np.int32).reshape(15, 2).tolist(),
            [len(one.ranks) // 4 for one in of_prompts],
            of_prompts[1].top_ids,
            result.token_ids,
        ]

    with emulated_gpu() as gpu:
        found = scores(DEVICE, partial(launch, gpu))
        assert gpu.num_replays == 1
    expected = scores(CPU, ModelRunner.launch)
    for one, other in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert found[2:] == expected[2:]
    assert found[3:5] == [[15, 9], b""]


@pytest.mark.parametrize("name", ["opt", "llama, grouped heads"])
def test_the_step_that_finds_out_how_much_memory_it_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also compiles the attention of decodes beside prompts: their tokens are written before."""
    written_before: list[bool] = []
    paged_decode = gpu_decode.paged_decode

    def noting(query: Any, *args: Any) -> None:
        written_before.extend([args[-1] is None] * len(query))
        paged_decode(query, *args)

    monkeypatch.setattr(gpu_decode, "paged_decode", noting)
    config = model_config(tmp_path, MODELS[name])
    with emulated_gpu():
        cache = empty_cache(config, num_blocks=1).zero_().to(DEVICE)
        run_largest_step(load_model(config, DEVICE), config, cache, LIMITS, RankPlace())
        assert not cache.to("cpu").any()
    assert written_before == [True] * config.num_layers


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is one of two ranks. The other accepts whatever is sent, and sends anything."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1])
def test_activations_on_their_way_to_the_next_stage_count(
    stage: int, tmp_path: Path, two_ranks: None
) -> None:
    config = model_config(tmp_path, MODELS["opt"])
    width, num_stages = config.hidden_size, 2
    place = RankPlace(stage=stage, num_stages=num_stages)
    sent = []
    with emulated_gpu(), pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        for name in ("memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda _: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
        model = load_model(config, DEVICE, layers=layers_of_stages(config, num_stages)[stage])
        cache = empty_cache(config, num_blocks=1).zero_().to(DEVICE)
        counted = step_bytes(model, config, cache, LIMITS, place, ALONE)
        if not place.is_last_stage:
            pipeline = Pipeline(place, width, torch.float32, DEVICE)
            for _ in range(10):
                hidden = torch.zeros(LIMITS.max_tokens, width, device=DEVICE)
                pipeline.send(hidden)
                sent.append(weakref.ref(hidden))
            del hidden
            gc.collect()
    assert config.dtype == "float32"
    assert counted == sum(one() is not None for one in sent) * LIMITS.max_tokens * width * 4


@pytest.mark.parametrize("make_store", [PlainStore, StagedInt8Store])
def test_blocks_go_to_the_host_and_back(
    make_store: Callable[[torch.Tensor, int], HostStore],
) -> None:
    kv = torch.randn(9, 2, 2, 1, 16, 32)
    expected = kv[[1, 2, 5]]
    if make_store is StagedInt8Store:
        expected = dequantize(*quantize(expected, 16), kv.dtype)
    with emulated_gpu() as gpu:
        on_device = kv.to(DEVICE)
        store = make_store(on_device, 6)
        gpu.waits.clear()
        for transfer, (is_out, blocks) in enumerate([(True, (1, 2, 5)), (False, (6, 7, 0))]):
            ids = (array("i", some).tobytes() for some in (blocks, (3, 4, 0)))
            copy_blocks(store, CopyBlocks(transfer, is_out, *ids, 16))
        assert gpu.waits == []
        torch.testing.assert_close(on_device.to("cpu")[[6, 7, 0]], expected)
        store.close()


class FailingStore(HostStore):
    """A host store that fails when part of a copy has begun."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(torch.empty(9, 1), num_blocks=6, block_bytes=1)
        self._notes = notes

    def copy_out(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        num_last_tokens: int,
        num_last: int = 1,
    ) -> None:
        self._notes.append("begins")
        raise RuntimeError("out of resources")

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self.copy_out(device_blocks, host_blocks, 1)


@pytest.mark.parametrize("is_out", [True, False])
def test_a_copy_that_fails_midway_has_ended_when_it_is_answered(is_out: bool) -> None:
    notes: list[str] = []
    results: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()

    def send(result: CopyResult) -> None:
        notes.append("answered")
        results.put(result)

    with emulated_gpu(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda _: notes.append("ended"))
        swaps = SwapEngine(FailingStore(notes), DEVICE, send_out=send, send_in=send)
        blocks = array("i", [1]).tobytes()
        swaps.start_copy(CopyBlocks(7, is_out, blocks, blocks, 16))
        result = results.get(timeout=DEADLINE_S)
    assert (result.transfer_id, result.error) == (7, "RuntimeError: out of resources")
    assert notes == ["begins", "ended", "answered"]


class TestTheEmulatedGPU:
    def test_refuses_what_a_gpu_refuses(self) -> None:
        with emulated_gpu() as gpu:
            here, there = torch.ones(3, device=DEVICE), torch.ones(3)
            for mixed in (lambda: here + there, lambda: here.index_fill_(0, there.long(), 1.0)):
                with pytest.raises(RuntimeError, match="to be on the same device"):
                    mixed()
            with pytest.raises(ValueError, match="cannot access the host's memory"):
                activations.silu_mul(torch.ones(1, 64))
            for wait in (lambda: here.sum().item(), lambda: there.to(DEVICE)):
                with (
                    pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
                    torch.cuda.graph(torch.cuda.CUDAGraph()),
                ):
                    wait()
            assert gpu.waits == []

    def test_notes_what_a_host_waits_for(self) -> None:
        with emulated_gpu() as gpu:
            here, pinned = torch.ones(3, device=DEVICE), torch.ones(3).pin_memory()
            index = torch.tensor([0, 2])
            for name, wait in {
                "_local_scalar_dense": lambda: here[0].item(),
                "masked_select": lambda: here.masked_select(here > 0),
                "an index that is a mask": lambda: here[here > 0],
                "an index of the host's": lambda: here[index],
                "a copy of the host": lambda: here.copy_(pinned),
                "a copy of pageable memory": lambda: here.copy_(torch.ones(3), non_blocking=True),
                "a copy to the host": lambda: here.cpu(),
                "synchronize": torch.cuda.synchronize,
            }.items():
                wait()
                assert gpu.waits == [name]
                gpu.waits.clear()
            here.copy_(pinned, non_blocking=True)
            assert here.to("cpu", non_blocking=True).tolist() == [1, 1, 1]
            assert gpu.waits == []

    def test_a_graph_computes_anew_from_the_same_memory(self) -> None:
        with emulated_gpu():
            x, graph = torch.ones(3, device=DEVICE), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = 2 * x[:2] + torch.zeros(2, device=DEVICE)
            assert y.isnan().to("cpu").all()
            for value in (3.0, 4.0):
                x.fill_(value)
                graph.replay()
                assert y.to("cpu").tolist() == [2 * value] * 2
