"""Jobs leave the device and return with the same tokens."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.job import FinishReason, JobOutput
from fastserve_backend.rank_protocol.messages import CopyBlocks, CopyResult, Step, StepResult
from live_engine import wait_until_free
from small_model import MAX_MODEL_LEN, VOCAB_SIZE
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")

BLOCK_SIZE = 16
OUTPUT = 32
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
# For a model this small every copy is cheaper than recomputing, so jobs recompute only when the
# host is full.
SWAPPING = {"max_num_seqs": 10, "swap_space_gib": 0.02, "policy": "skip_join_mlfq"}
STRATEGIES = ("defer", "recompute", "reactive", "proactive")
# Each case starts an engine: every strategy with and without preemption, other policies with one
# strategy.
CASES = [(strategy, policy) for strategy in STRATEGIES for policy in ("fcfs", "skip_join_mlfq")]
CASES += [("proactive", policy) for policy in ("mlfq", "fixed_priority", "srpt", "gittins")]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(8)
    lengths = [rng.randint(1, MAX_MODEL_LEN - OUTPUT) for _ in range(50)]
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def blocks(prompts: list[list[int]]) -> int:
    """Blocks for 30% of what all jobs need together."""
    needed = sum(-(-(len(prompt) + OUTPUT) // BLOCK_SIZE) for prompt in prompts)
    return max(needed * 3 // 10, MAX_MODEL_LEN // BLOCK_SIZE)


@pytest.fixture(scope="module")
def expected(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens with memory for all jobs; ``test_parity`` compares such tokens with
    transformers."""
    answers = tokens_of(llm, prompts)
    assert len({tuple(answer) for answer in answers}) == len(answers)
    return answers


class LLMOver(LLM):
    """An LLM over ranks of the test's choice, whose block tables are checked at each step."""

    def __init__(
        self, make_executor: Callable[[], DistributedExecutor], model: str, **options: Any
    ) -> None:
        config = EngineConfig().with_keys(model=model, **options)
        self.engine = Engine(config, make_executor=make_executor, check_integrity=True)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(prompts, GREEDY, progress=False)]


@pytest.fixture
def small(checkpoint: Path, tokenizer: Path, blocks: int) -> Callable[..., LLM]:
    def start(
        make_executor: Callable[[], DistributedExecutor] = DistributedExecutor, **keys: Any
    ) -> LLM:
        keys = SWAPPING | {"device_blocks": blocks, "base_quantum_ms": 0.01} | keys
        return LLMOver(make_executor, str(checkpoint), tokenizer=str(tokenizer), **keys)

    return start


def assert_all_free(llm: LLM) -> None:
    """Asserts that both tiers are free once the last copies have ended, maybe after the last
    job."""
    total = llm.engine.snapshot().num_host_blocks
    wait_for(lambda: llm.engine.snapshot().free_host_blocks == total)
    wait_until_free(llm)
    assert llm.engine.snapshot().swapped == 0


@pytest.mark.parametrize(("strategy", "policy"), CASES)
def test_tokens_are_those_of_an_engine_with_memory_for_all(
    small: Callable[..., LLM],
    prompts: list[list[int]],
    expected: list[list[int]],
    strategy: str,
    policy: str,
) -> None:
    with small(strategy=strategy, policy=policy) as llm:
        assert tokens_of(llm, prompts) == expected
        assert_all_free(llm)
        counters = llm.engine.counters
        swaps = counters.swap_out_bytes > 0 and counters.swap_in_bytes > 0
        if "mlfq" in policy:
            assert counters.preemptions > 0
            assert swaps == (strategy in ("reactive", "proactive"))
        if strategy == "recompute" and policy != "fcfs":
            assert counters.recomputed_jobs > 0
        if strategy == "defer":
            assert counters.recomputed_jobs == 0


@pytest.mark.parametrize(
    "options",
    [
        {"incremental": False},
        {"write_back": False},
        {"strategy": "reactive", "incremental": False, "policy": "mlfq"},
        {"prefill_chunk_tokens": 30},
        {"starvation_ms": 1},
        {"swap_space_gib": 0.0},
        {"swap_space_gib": 0.001},
        {"block_size": 8, "device_blocks": 60, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_tokens_with_options(
    small: Callable[..., LLM],
    prompts: list[list[int]],
    expected: list[list[int]],
    options: dict[str, Any],
) -> None:
    with small(**options) as llm:
        assert tokens_of(llm, prompts) == expected
        assert_all_free(llm)
        if not options.get("swap_space_gib", 1):
            assert llm.engine.counters.swap_out_bytes == 0
            # Each job has room to grow by four blocks before another begins, and needs two.
            assert llm.engine.counters.recomputed_jobs == 0


def test_int8_blocks_on_the_host_serve_every_job(
    small: Callable[..., LLM], prompts: list[list[int]]
) -> None:
    """Tokens may differ, as the scores of this random model are closer together than a real
    one's."""
    with small(host_dtype="int8") as llm:
        answers = tokens_of(llm, prompts)
        assert [len(answer) for answer in answers] == [OUTPUT] * 50
        assert_all_free(llm)
        assert llm.engine.counters.swap_in_bytes > 0


@pytest.mark.parametrize("strategy", ["recompute", "proactive"])
def test_tokens_with_int8_blocks_on_the_device(
    small: Callable[..., LLM], prompts: list[list[int]], strategy: str
) -> None:
    """A token's codes do not depend on its neighbours, so neither a swap nor a recomputation
    changes an answer."""
    with small(device_dtype="int8", device_blocks=600) as llm:
        expected = tokens_of(llm, prompts)
    with small(device_dtype="int8", strategy=strategy) as llm:
        assert tokens_of(llm, prompts) == expected
        assert_all_free(llm)
        counters = llm.engine.counters
        moved = counters.recomputed_jobs if strategy == "recompute" else counters.swap_in_bytes
        assert moved > 0


class BrokenLink(DistributedExecutor):
    """Real ranks on which every third copy fails."""

    def __init__(self) -> None:
        super().__init__()
        self.num_failed = 0

    def copy(self, blocks: CopyBlocks) -> None:
        if blocks.transfer_id % 3 == 0:
            # The host block does not exist, which the rank itself finds and reports.
            blocks.host_blocks = b"\xff\xff\xff\x7f" * (len(blocks.host_blocks) // 4)
            self.num_failed += 1
        super().copy(blocks)


def test_a_failed_copy_costs_time_and_nothing_else(
    small: Callable[..., LLM], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    executor = BrokenLink()
    with small(lambda: executor) as llm:
        assert tokens_of(llm, prompts) == expected
        assert_all_free(llm)
        assert executor.num_failed > 3
        assert llm.engine.counters.recomputed_jobs > 0


class SlowLink(DistributedExecutor):
    """Real ranks whose copies report their results some steps late."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[int, CopyResult]] = []  # (step at which it comes, result)
        self._num_steps = 0

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        if self._held and (self._held[0][0] <= self._num_steps or not self._flights):
            return self._held.pop(0)[1]
        result = super().collect(timeout_s)
        if isinstance(result, CopyResult):
            self._held.append((self._num_steps + 5, result))
            return self.collect(timeout_s)
        if result is not None:
            self._num_steps += 1
        return result


def test_slow_copies_stop_nobody_else(
    small: Callable[..., LLM], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with small(SlowLink) as llm:
        assert tokens_of(llm, prompts) == expected
        assert_all_free(llm)
        assert llm.engine.counters.swap_in_bytes > 0


class Deaf(DistributedExecutor):
    """Real ranks that from some moment on lose all messages of one kind."""

    loses: type | None = None

    def _send(self, message: Any, ranks: Any = None) -> None:
        if self.loses is None or not isinstance(message, self.loses):
            super()._send(message, ranks)


@pytest.mark.parametrize(
    ("loses", "limit"), [(CopyBlocks, "COPY_TIMEOUT_S"), (Step, "STEP_TIMEOUT_S")]
)
def test_what_never_ends_costs_a_restart(
    small: Callable[..., LLM],
    prompts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    loses: type,
    limit: str,
) -> None:
    deaf = Deaf()
    executors = iter((deaf, DistributedExecutor()))

    def next_executor() -> DistributedExecutor:
        monkeypatch.undo()  # steps of the next ranks may take their time
        return next(executors)

    with small(next_executor) as llm:
        monkeypatch.setattr(f"fastserve_backend.executor.distributed.{limit}", 1.0)
        deaf.loses = loses
        assert tokens_of(llm, prompts) == expected
        assert_all_free(llm)
        assert llm.engine.counters.worker_restarts == 1


def test_jobs_cancelled_while_their_kv_is_on_its_way_leave_nothing(
    small: Callable[..., LLM], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    rng = random.Random(2)
    with small() as llm:
        ends: dict[int, FinishReason] = {}
        got: dict[int, list[int]] = {}
        numbers: dict[int, int] = {}
        known = threading.Lock()  # each job's number, before its outputs are looked at

        def sink_of(index: int) -> Callable[[JobOutput], None]:
            stop_after = rng.randint(1, OUTPUT - 1) if index % 3 == 0 else OUTPUT + 1

            def sink(output: JobOutput) -> None:
                got.setdefault(index, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    ends[index] = output.finish_reason
                elif len(got[index]) >= stop_after:
                    with known:
                        llm.engine.cancel(numbers[index])

            return sink

        for index, prompt in enumerate(prompts):
            with known:
                numbers[index] = llm.engine.submit(str(index), prompt, GREEDY, sink_of(index))
        assert llm.engine.drain(120.0)
        assert len(ends) == 50
        for index, answer in enumerate(expected):
            assert got[index] == answer[: len(got[index])]
            if index % 3:
                assert ends[index] is FinishReason.LENGTH
        assert FinishReason.CANCELLED in ends.values()
        assert_all_free(llm)
