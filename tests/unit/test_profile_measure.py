"""Measuring modelled ranks recovers their known times within the time limit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.profile.latency import Curve
from fastserve_backend.profile.loads import Limits, brief_grid, full_grid, random_mixes
from fastserve_backend.profile.measure import (
    BUSY_PATIENCE,
    FULL_BUDGET_S,
    MAX_BRIEF_BUDGET_S,
    ReadyRanks,
    _StepTimer,
    _with_scores,
    measure_briefly,
    measure_fully,
)
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.simulation.simulated_executor import SimulatedExecutor
from fastserve_backend.system.clock import VirtualClock
from hypothesis import given
from hypothesis import strategies as st
from profiles import LIMITS, LINK, identity, known_profile


class Slower(LatencyModel):
    """A machine on which everything takes ``factor`` times as long."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def iteration_s(self, load: IterationLoad) -> float:
        return self._factor * known_profile().iteration_s(load)

    def score_s(self, num_tokens: int) -> float:
        return self._factor * known_profile().score_s(num_tokens)


class CountingExecutor(SimulatedExecutor):
    """Records the steps that it gets."""

    def __init__(self, model: LatencyModel, clock: VirtualClock) -> None:
        super().__init__(model, clock, LINK)
        self.steps: list[Step] = []

    def submit(self, step: Step) -> None:
        self.steps.append(step)
        super().submit(step)


def ranks(executor: CountingExecutor, clock: VirtualClock, limits: Limits = LIMITS) -> ReadyRanks:
    return ReadyRanks(identity(), limits, LINK, executor, clock.now)


def known_ranks() -> ReadyRanks:
    clock = VirtualClock()
    return ranks(CountingExecutor(known_profile(), clock), clock)


def test_a_brief_measurement_finds_the_known_machine() -> None:
    clock, truth = VirtualClock(), known_profile()
    profile = measure_briefly(ranks(CountingExecutor(truth, clock), clock))
    assert clock.now() <= MAX_BRIEF_BUDGET_S + truth.prefill_s(2048)
    for length in (4, 100, 1000):
        assert profile.prefill_s(length) == pytest.approx(truth.prefill_s(length), rel=0.15)
        assert profile.decode_s(length) == pytest.approx(truth.decode_s(length), rel=0.15)
    assert profile.num_blocks == LIMITS.num_blocks
    assert profile.scored_token_s == pytest.approx(truth.scored_token_s, rel=0.15)


def test_a_full_measurement_predicts_held_out_mixes_and_tells_how_well() -> None:
    clock, truth = VirtualClock(), known_profile()
    shares: list[float] = []
    measurement = measure_fully(ranks(CountingExecutor(truth, clock), clock), shares.append)
    error = measurement.profile.held_out_error
    assert error is not None
    assert error < 0.03
    assert len(measurement.held_out) >= 20
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for sample in measurement.held_out:
        assert sample.seconds == pytest.approx(truth.iteration_s(sample.load))


@pytest.mark.parametrize("max_model_len", [1, 2, 40])
def test_log_probabilities_are_measured_as_far_as_prompts_go(max_model_len: int) -> None:
    clock, truth = VirtualClock(), known_profile()
    limits = replace(LIMITS, max_model_len=max_model_len)
    profile = measure_briefly(ranks(CountingExecutor(truth, clock), clock, limits))
    expected = 0.0 if max_model_len == 1 else truth.scored_token_s
    assert profile.score_s(10) == pytest.approx(10 * expected, rel=0.15)


def test_a_wrong_profile_makes_no_log_probabilities_of_prompts_dear() -> None:
    """They and the prompts must be wrong by the same factor, or their chunks would vanish."""
    clock = VirtualClock()
    timer = _StepTimer(ranks(CountingExecutor(known_profile(), clock), clock))
    truth = known_profile()
    wrong = replace(truth, base_s=0.001, tokens=Curve((0,), (1e-6,)), scored_token_s=0.0)
    found = _with_scores(wrong, timer, LIMITS, 1.0)
    expected = truth.score_s(255) / truth.prefill_s(256)
    assert found.score_s(255) / found.prefill_s(256) == pytest.approx(expected)


@pytest.mark.parametrize("factor", [1, 10, 100, 1000])
def test_a_slow_machine_is_measured_less_not_longer(factor: int) -> None:
    longest_s = factor * known_profile().prefill_s(2048)
    clock = VirtualClock()
    executor = CountingExecutor(Slower(factor), clock)
    measure_briefly(ranks(executor, clock))
    assert clock.now() <= MAX_BRIEF_BUDGET_S + longest_s
    clock = VirtualClock()
    executor = CountingExecutor(Slower(factor), clock)
    measure_fully(ranks(executor, clock), lambda share: None)
    assert clock.now() <= FULL_BUDGET_S + longest_s


class Throttled(LatencyModel):
    """A machine whose speed halves every now and then, for ten seconds at a time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def iteration_s(self, load: IterationLoad) -> float:
        slow = int(self._clock.now() / 10) % 3 == 2
        return (2 if slow else 1) * known_profile().iteration_s(load)


def test_slow_spells_do_not_show_in_the_profile() -> None:
    clock, truth = VirtualClock(), known_profile()
    executor = CountingExecutor(Throttled(clock), clock)
    measurement = measure_fully(ranks(executor, clock), lambda share: None)
    assert measurement.profile.held_out_error is not None
    assert measurement.profile.held_out_error < 0.05
    for length in (4, 100, 1000):
        assert measurement.profile.prefill_s(length) == pytest.approx(
            truth.prefill_s(length), rel=0.15
        )


class Contended(LatencyModel):
    """Ranks that get a core only now and then, as on a busy machine: a step waits for up to nine
    times as long as it runs."""

    def __init__(self) -> None:
        self._random = random.Random(5)
        self._waited_s = 0.0

    def iteration_s(self, load: IterationLoad) -> float:
        own_s = known_profile().iteration_s(load)
        wait_s = self._random.uniform(1, 9) * own_s
        self._waited_s += wait_s
        return own_s + wait_s

    def waited_s(self, passed_s: float) -> float:
        """As of ``ReadyRanks``."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


def test_waits_for_cores_do_not_show_in_the_times() -> None:
    clock, truth, machine = VirtualClock(), known_profile(), Contended()
    waiting = ranks(CountingExecutor(machine, clock), clock)
    profile = measure_briefly(replace(waiting, waited_s=machine.waited_s))
    assert profile.busy
    for length in (4, 100, 1000):
        assert profile.prefill_s(length) == pytest.approx(truth.prefill_s(length), rel=0.15)
        assert profile.decode_s(length) == pytest.approx(truth.decode_s(length), rel=0.15)
    longest_s = 10 * truth.prefill_s(2048)
    assert clock.now() <= BUSY_PATIENCE * MAX_BRIEF_BUDGET_S + longest_s


def test_load_that_nobody_counts_shows_in_the_scatter() -> None:
    clock, truth = VirtualClock(), known_profile()
    profile = measure_briefly(ranks(CountingExecutor(Contended(), clock), clock))
    assert profile.busy
    assert truth.decode_s(100) < profile.decode_s(100) < 6 * truth.decode_s(100)


def test_a_quiet_machine_is_not_busy() -> None:
    for measured in (
        measure_briefly(known_ranks()),
        measure_fully(known_ranks(), lambda share: None).profile,
    ):
        assert not measured.busy


def test_every_step_is_one_that_the_engine_could_send() -> None:
    clock = VirtualClock()
    executor = CountingExecutor(known_profile(), clock)
    measure_fully(ranks(executor, clock), lambda share: None)
    assert executor.steps
    for step in executor.steps:
        load = IterationLoad.of_step(step)
        assert load.num_tokens <= LIMITS.max_batched_tokens
        assert len(step.query_lens) // 4 <= LIMITS.max_seqs
        blocks = memoryview(step.block_ids).cast("i")
        assert max(blocks) < LIMITS.num_blocks
        counts = memoryview(step.query_lens).cast("i")
        starts = memoryview(step.starts).cast("i")
        needed = [-(-(s + n) // 16) for s, n in zip(starts, counts, strict=True)]
        assert list(memoryview(step.block_counts).cast("i")) == needed
        num_decodes = step.num_decodes
        assert all(count == 1 for count in counts[:num_decodes])
        assert all(count > 1 for count in counts[num_decodes:])


@given(
    limits=st.builds(
        Limits,
        max_seqs=st.integers(1, 64),
        max_batched_tokens=st.integers(1, 4096),
        max_model_len=st.integers(2, 4096),
        num_blocks=st.integers(1, 500),
        block_size=st.sampled_from([8, 16, 32]),
    ),
    seed=st.integers(0, 1000),
)
def test_all_loads_keep_the_limits(limits: Limits, seed: int) -> None:
    grids = brief_grid(limits) + full_grid(limits)
    mixes = random_mixes(limits, 20, random.Random(seed))
    assert all(limits.hold(mix) for mix in grids + mixes)
    assert grids
    assert len(mixes) == 20
