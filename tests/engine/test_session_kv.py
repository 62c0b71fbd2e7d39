"""On real ranks, turns that go on from held KV get the same tokens as without sessions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.job import ServiceLevel
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.session_history import SessionKey
from fastserve_backend.metrics.counters import EngineCounters
from live_engine import small_engine
from small_model import VOCAB_SIZE
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
NUM_TURNS = 4
SESSION = ServiceLevel(session_id="agent")
BLOCK_BYTES = 3 * 2 * 64 * 16 * 4  # of the checkpoint in float32
LENGTHS = (90, 20, 20, 20)  # what each turn adds


@pytest.fixture(scope="module")
def additions() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tokenizer: Path, additions: list[list[int]]) -> Iterator[list[Any]]:
    """The turns' answers without any reuse of KV."""
    with small_engine(checkpoint, tokenizer, prefix_caching=False) as llm:
        yield conversation(llm, additions, ServiceLevel())


def conversation(
    llm: LLM,
    additions: list[list[int]],
    service: ServiceLevel,
    between: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The answers of the turns.

    Args:
        between: called in each pause.
    """
    prompt: list[int] = []
    answers = []
    for added in additions:
        prompt = prompt + added
        (answer,) = llm.generate([prompt], GREEDY, service=service, progress=False)
        answers.append(answer.token_ids)
        prompt = prompt + answer.token_ids
        between()
    return answers


@pytest.mark.parametrize(
    "options",
    [{"prefix_caching": False, "prefill_chunk_tokens": 16}, {"pipeline_parallel_size": 2}],
)
def test_a_turn_goes_on_from_the_device(
    checkpoint: Path,
    tokenizer: Path,
    additions: list[list[int]],
    expected: list[Any],
    options: dict[str, Any],
) -> None:
    with small_engine(checkpoint, tokenizer, **options) as llm:
        assert conversation(llm, additions, SESSION) == expected
        counters = llm.engine.counters
        # Each turn computes its new tokens, and the last one of the answer before it.
        assert counters.session_miss_tokens == sum(LENGTHS) + NUM_TURNS - 1
        assert counters.swap_in_bytes == 0


@pytest.mark.parametrize("options", [{}, {"strategy": "reactive", "tensor_parallel_size": 2}])
def test_a_turn_goes_on_from_the_host(
    checkpoint: Path,
    tokenizer: Path,
    additions: list[list[int]],
    expected: list[Any],
    options: dict[str, Any],
) -> None:
    rng = random.Random(6)
    with small_engine(checkpoint, tokenizer, device_blocks=20, **options) as llm:

        def fill_device() -> None:
            prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(290)] for _ in range(2)]
            for prompt in prompts:  # the held KV is copied at the latest after the first
                llm.generate([prompt], GREEDY, progress=False)

        assert conversation(llm, additions, SESSION, fill_device) == expected
        counters = llm.engine.counters
        assert counters.session_miss_tokens == sum(LENGTHS) + NUM_TURNS - 1
        assert counters.swap_in_bytes > 0


def has_left_device(llm: LLM, service: ServiceLevel) -> bool:
    """Whether all KV of the paused session is on the host or on the disk."""
    kv = llm.engine._loop.kv
    turn = kv._sessions._turns.get(
        SessionKey(service.tenant, service.session_id, service.cache_salt)
    )
    if turn is None:
        return False
    is_on_host = kv.tiers.num_saved(turn.job.number) >= turn.num_tokens
    return is_on_host or kv.tiers.disk.has(turn.job.number)


@pytest.mark.parametrize(
    ("options", "block_bytes"),
    [
        ({"tensor_parallel_size": 2}, BLOCK_BYTES // 2),
        ({"host_dtype": "int8"}, BLOCK_BYTES // 4 + BLOCK_BYTES // 16),
    ],
)
def test_a_turn_goes_on_from_the_disk(
    checkpoint: Path,
    tokenizer: Path,
    additions: list[list[int]],
    expected: list[Any],
    tmp_path: Path,
    options: dict[str, Any],
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This model computes about as fast as disks read.
    monkeypatch.setattr(SwapCosts, "read_is_cheaper", lambda *_: True)

    def serve(num_host_blocks: int, **disk: Any) -> tuple[list[list[int]], EngineCounters]:
        rng = random.Random(8)
        keys = options | disk | {"swap_space_gib": num_host_blocks * block_bytes / 2**30}
        with small_engine(checkpoint, tokenizer, device_blocks=20, **keys) as llm:

            def fill_both() -> None:
                prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(290)]
                other = ServiceLevel(session_id=f"{rng.random()}")
                wait_for(lambda: has_left_device(llm, SESSION))
                llm.generate([prompt], GREEDY, service=other, progress=False)
                wait_for(lambda: has_left_device(llm, other))

            return conversation(llm, additions, SESSION, fill_both), llm.engine.counters

    disk = {"disk_swap_gib": 0.01, "disk_swap_dir": str(tmp_path)}
    answers, counters = serve(28, **disk)
    assert counters.disk_read_bytes > 0
    assert counters.disk_failures == 0
    if options.get("host_dtype") == "int8":  # it rounds
        expected, _ = serve(200)
    assert answers == expected


def test_a_turn_whose_kv_is_gone_computes_it_again(
    checkpoint: Path, tokenizer: Path, additions: list[list[int]], expected: list[Any]
) -> None:
    rng = random.Random(7)
    with small_engine(checkpoint, tokenizer, device_blocks=20, swap_space_gib=0) as llm:

        def fill_device() -> None:
            prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(300)]
            llm.generate([prompt], GREEDY, progress=False)

        assert conversation(llm, additions, SESSION, fill_device) == expected
        assert llm.engine.counters.session_hit_tokens == 0
