"""When ranks are restarted, and how an engine goes on meanwhile, on ranks without processes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from collector import Collector
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.errors import ConfigError, DrainingError, EngineError, FastServeError
from fastserve_backend.job import FinishReason
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.measure import ReadyRanks
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
    Ready,
    Setup,
    Step,
    StepResult,
)
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.system.restart_limit import RestartLimiter, RestartPauses
from hypothesis import given
from hypothesis import strategies as st
from profiles import known_profile
from remembering_ranks import RememberedKV
from waiting import DEADLINE_S

WAIT_S = DEADLINE_S
FOR_EVER = 10**9
READY = Ready(
    num_blocks=200,
    num_host_blocks=100,
    block_bytes=1000,
    block_out_s=1e-4,
    block_in_s=1e-4,
    hardware="a slide rule",
    dtype="float32",
)
PARAMS = SamplingParams(max_tokens=600, temperature=0.8, seed=5, ignore_eos=True)


def test_a_few_restarts_are_allowed_in_any_window() -> None:
    limiter = RestartLimiter()
    assert [limiter.take_restart(now) for now in (5.0, 100.0, 604.0)] == [1, 2, 3]
    assert limiter.take_restart(604.5) is None
    assert limiter.take_restart(605.0) == 3  # the first restart is outside the window
    assert limiter.take_restart(699.0) is None  # a refused restart does not count
    assert limiter.take_restart(5000.0) == 1
    assert limiter.describe() == "3 restarts in 10 minutes"


def test_the_time_of_starts_does_not_count() -> None:
    limiter = RestartLimiter()
    # Each start takes 600 s, and its ranks die 10 s later.
    for number, now in enumerate((0.0, 610.0, 1220.0), start=1):
        assert limiter.take_restart(now) == number
        limiter.leave_out(600.0)
    assert limiter.take_restart(1830.0) is None
    assert limiter.take_restart(2400.0) == 3  # without the starts 600 s have passed since the first


def test_pauses_between_restarts_grow_and_end_when_it_lives() -> None:
    pauses = RestartPauses()
    now, taken = 0.0, []
    for _ in range(40):  # it dies as soon as it has started, which takes 100 s
        taken.append(pauses.take_pause(now))
        now += taken[-1] + 100.0
        pauses.leave_out(100.0)
    assert taken[:9] == [0.0, 0.0, 0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert set(taken[9:]) == {60.0}
    assert pauses.take_pause(now + 700.0) == 0.0


@given(st.lists(st.floats(0, 1000), max_size=40))
def test_no_window_has_more_restarts_than_allowed(pauses: list[float]) -> None:
    limiter = RestartLimiter()
    now, allowed = 0.0, []
    for pause in pauses:
        now += pause
        in_window = sum(now - time_s < 600.0 for time_s in allowed)
        assert (limiter.take_restart(now) is not None) == (in_window < 3)
        if in_window < 3:
            allowed.append(now)


class FakeRanks:
    """Ranks in this process, which die in the step after ``steps_to_live``.

    Args:
        error: the error that their start raises.
        opens: if false, the start waits for ``opened``.
    """

    def __init__(
        self,
        steps_to_live: int = FOR_EVER,
        *,
        error: FastServeError | None = None,
        opens: bool = True,
    ) -> None:
        self.ready = READY
        self._steps_to_live = steps_to_live
        self.opened = threading.Event()  # start waits for it
        if opens:
            self.opened.set()
        self.starting = threading.Event()
        self.killed = self.closed = False
        self._error = error
        self._kv = RememberedKV(READY.num_blocks, READY.num_host_blocks, 16)
        self._results: deque[StepResult | CopyResult] = deque()

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        self.starting.set()
        assert self.opened.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        if self.killed:
            raise EngineError("rank 0 died with exit code -9")
        return self.ready

    @property
    def can_submit(self) -> bool:
        return not any(isinstance(result, StepResult) for result in self._results)

    def submit(self, step: Step) -> None:
        self._steps_to_live -= 1
        self._results.append(StepResult(step.step_id, self._kv.run(step), 0.0, b"", []))

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        self._kv.copy(blocks)
        self._results.append(CopyResult(blocks.transfer_id, 1e-4, None))

    @property
    def can_submit_ahead(self) -> bool:
        return not self.can_submit and sum(isinstance(r, StepResult) for r in self._results) == 1

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        self.check()
        return self._results.popleft()

    def check(self) -> None:
        if self._steps_to_live < 0:
            raise EngineError("rank 0 died")

    def kill(self) -> None:
        self.killed = True
        self.opened.set()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hardware whose profiles were measured."""
    hardware = []

    def measure(path: object, ranks: ReadyRanks) -> LatencyProfile:
        hardware.append(ranks.identity.hardware)
        return replace(known_profile(), identity=ranks.identity)

    monkeypatch.setattr("fastserve_backend.engine.supervision.load_or_measure", measure)
    return hardware


Serve = Callable[..., Engine]


@pytest.fixture
def serve(measured: list[str]) -> Iterator[Serve]:
    """Starts an engine over these ranks; each takes over when the previous ones are lost."""
    engines = []

    def start(*ranks: FakeRanks) -> Engine:
        config = EngineConfig().with_keys(model="opt-125m", load_format="dummy")
        fresh = iter(ranks)
        engine = Engine(config, make_executor=lambda: next(fresh), check_integrity=True)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


def submit(engine: Engine, *prompts: list[int]) -> list[Collector]:
    clients = [Collector() for _ in prompts]
    for prompt, client in zip(prompts, clients, strict=True):
        engine.submit("job", prompt, PARAMS, client)
    return clients


@pytest.fixture
def expected(serve: Serve) -> list[list[int]]:
    clients = submit(serve(FakeRanks()), *PROMPTS)
    assert all(client.wait().finish_reason is FinishReason.LENGTH for client in clients)
    return [client.token_ids for client in clients]


PROMPTS = ([5, 6, 7], [9] * 40, [300])


def test_jobs_go_on_and_arrivals_wait(serve: Serve, expected: list[list[int]]) -> None:
    first, second = FakeRanks(50), FakeRanks(opens=False)
    engine = serve(first, second)
    clients = submit(engine, *PROMPTS[:2])
    assert second.starting.wait(WAIT_S)
    assert first.killed
    assert first.closed
    clients += submit(engine, PROMPTS[2])
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 3)
    assert snapshot.free_blocks == snapshot.num_blocks
    second.opened.set()
    for client, tokens in zip(clients, expected, strict=True):
        assert client.wait().finish_reason is FinishReason.LENGTH
        assert client.token_ids == tokens
    assert engine.failure is None
    assert engine.counters.worker_restarts == 1
    assert engine.counters.finished == {"length": 3}
    assert engine.drain(WAIT_S)
    assert engine.snapshot().free_blocks == READY.num_blocks


def test_a_job_cancelled_during_the_restart_ends_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastserve_backend.engine.engine.IDLE_CHECK_S", 10 * WAIT_S)
    first, second = FakeRanks(50), FakeRanks(opens=False)
    engine = serve(first, second)
    client, other = submit(engine, *PROMPTS[:2])
    assert second.starting.wait(WAIT_S)
    engine.cancel(0)  # the first to be submitted
    assert client.wait().finish_reason is FinishReason.CANCELLED
    second.opened.set()
    assert other.wait().finish_reason is FinishReason.LENGTH


@pytest.fixture
def restarting(serve: Serve) -> tuple[Engine, FakeRanks, Collector]:
    """An engine in a restart, its next ranks, and the client of its only job."""
    ranks = FakeRanks(opens=False)
    engine = serve(FakeRanks(50), ranks)
    (client,) = submit(engine, PROMPTS[0])
    assert ranks.starting.wait(WAIT_S)
    assert not engine.drain(0.0)
    return engine, ranks, client


def test_closing_during_the_restart_does_not_wait_for_it(
    restarting: tuple[Engine, FakeRanks, Collector],
) -> None:
    engine, ranks, client = restarting
    with pytest.raises(DrainingError):
        submit(engine, PROMPTS[1])
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < WAIT_S / 2  # the restart would take all of WAIT_S
    assert client.wait().finish_reason is FinishReason.CANCELLED
    assert ranks.killed
    assert ranks.closed


def test_draining_waits_for_the_jobs_that_the_restart_delays(
    restarting: tuple[Engine, FakeRanks, Collector],
) -> None:
    engine, ranks, client = restarting
    ranks.opened.set()
    assert engine.drain(WAIT_S)
    assert client.wait().finish_reason is FinishReason.LENGTH


def test_a_restart_that_fails_counts(serve: Serve, expected: list[list[int]]) -> None:
    first, last = FakeRanks(50), FakeRanks(700)
    failing = FakeRanks(error=EngineError("rank 0 died")), FakeRanks(error=ConfigError("no memory"))
    engine = serve(first, *failing, last)
    (client,) = submit(engine, PROMPTS[0])
    assert client.wait().finish_reason is FinishReason.LENGTH
    assert client.token_ids == expected[0]
    assert engine.counters.worker_restarts == 3
    assert all(ranks.closed for ranks in failing)
    (client,) = submit(engine, PROMPTS[1])
    assert "given up" in (client.wait().error or "")


def test_after_too_many_restarts_all_jobs_fail_with_the_reason(serve: Serve) -> None:
    ranks = [FakeRanks(50) for _ in range(4)]
    engine = serve(*ranks)
    clients = submit(engine, *PROMPTS)
    reason = "the model's processes failed: rank 0 died; given up after 3 restarts in 10 minutes"
    for client in clients:
        end = client.wait()
        assert (end.finish_reason, end.error) == (FinishReason.ERROR, reason)
    assert engine.failure == reason
    assert engine.gave_up
    with pytest.raises(EngineError, match="given up"):
        submit(engine, PROMPTS[0])
    assert engine.drain(WAIT_S)
    engine.close()
    assert all(each.closed for each in ranks)


def test_every_close_waits_for_the_end(serve: Serve) -> None:
    class SlowToClose(FakeRanks):
        def __init__(self) -> None:
            super().__init__()
            self.closing, self.may_close = threading.Event(), threading.Event()

        def close(self) -> None:
            self.closing.set()
            assert self.may_close.wait(WAIT_S)
            super().close()

    ranks = SlowToClose()
    engine = serve(ranks)
    first, second = (threading.Thread(target=engine.close) for _ in range(2))
    first.start()
    assert ranks.closing.wait(WAIT_S)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    ranks.may_close.set()
    first.join()
    second.join()
    assert ranks.closed


def test_a_profile_is_measured_again_only_of_other_hardware(
    serve: Serve, measured: list[str]
) -> None:
    first, same, other = FakeRanks(50), FakeRanks(50), FakeRanks()
    other.ready = Ready(200, 100, 1000, 1e-4, 1e-4, "an abacus", "float32")
    engine = serve(first, same, other)
    (client,) = submit(engine, PROMPTS[0])
    assert client.wait().finish_reason is FinishReason.LENGTH
    assert measured == ["a slide rule", "an abacus"]
    assert engine.profile.model.identity.hardware == "an abacus"


def test_a_disk_that_is_missing_after_a_restart_is_done_without(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = FakeRanks(50), FakeRanks()
    second.ready = msgspec.structs.replace(READY, disk_error="the disk is full")
    (client,) = submit(serve(first, second), PROMPTS[0])
    assert client.wait().finish_reason is FinishReason.LENGTH
    assert "no KV is written to the disk: the disk is full" in caplog.text
    with pytest.raises(ConfigError, match="the disk is full"):
        serve(second)


@pytest.mark.parametrize(("interval_s", "each_time"), [(60.0, False), (0.0, True)])
def test_a_drift_is_not_logged_each_time(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    interval_s: float,
    each_time: bool,
) -> None:
    monkeypatch.setattr("fastserve_backend.profile.correction._DRIFT_LOG_INTERVAL_S", interval_s)
    caplog.set_level("INFO")

    def measure(path: object, ranks: ReadyRanks) -> LatencyProfile:
        return replace(known_profile(), identity=ranks.identity, base_s=4.0)

    monkeypatch.setattr("fastserve_backend.engine.supervision.load_or_measure", measure)
    # These ranks take no time, so the ratio falls far, by a notable step at a time.
    (client,) = submit(serve(FakeRanks()), [5, 6, 7])
    client.wait()
    times = caplog.text.count("times the profile's prediction")
    assert times > 5 if each_time else times == 1
