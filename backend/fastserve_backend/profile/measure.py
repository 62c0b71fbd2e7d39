"""Measure the latency profile on real ranks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.config import EngineConfig
from fastserve_backend.executor.base import Executor
from fastserve_backend.profile.core_waits import CoreWaits
from fastserve_backend.profile.fit import Sample, fit, mean_error
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.latency import Identity, LatencyProfile
from fastserve_backend.profile.loads import Limits, Mix, brief_grid, full_grid, random_mixes
from fastserve_backend.profile.timings import Timing, do_scatter, shortest_seconds, show_load
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.rank_protocol.messages import PromptRows, Ready, Step
from fastserve_backend.sampling_params import MAX_LOGPROBS

# Of a step, others leave the ranks at least this share. The counts of Linux are not exact.
_LEAST_SHARE = 0.02
# Keeps the start short: so many times a decode of one job, but at least and at most so long. A slow
# model is measured with shorter prompts and fewer repeats.
_BRIEF_DECODES = 100
MIN_BRIEF_BUDGET_S, MAX_BRIEF_BUDGET_S = 1.0, 5.0
# Waits for cores do not count, and timings that scatter are repeated. So a start on a busy machine
# measures for longer than that: up to so many times, or up to the maximum if that is longer.
BUSY_PATIENCE = 2.0
# For a user who asked for a profile, and waits for it.
FULL_BUDGET_S = 80.0
# After this many repeats the shortest times hardly move.
_MAX_ROUNDS = 7
# Iterations longer than this many times the typical one average out disturbances by themselves.
# Only every third round has them.
_LONG = 4.0
_LONG_PERIOD = 3
# Share of the time for a first round, which warms everything up and drops the longest iterations.
_WARM_UP_SHARE = 0.3
_BRIEF_MIXES = 4
_FULL_MIXES = 16
_HELD_OUT_MIXES = 24
# A prompt's log-probabilities are measured with so many tokens, where no fixed cost counts much, or
# with fewer if that takes too long. The prompt runs so often with them, and as often without.
_MOST_SCORED, _LEAST_SCORED = 256, 16
_SCORED_ROUNDS = 3
_SCORED_SHARE = 0.2
# As in serving, this much KV does not fit in a processor's caches. It is written in a few seconds.
_KV_TOKENS = 8192
_SEED = 17

Progress = Callable[[float], None]
"""Called with the share of the time budget that has passed."""


@dataclass(frozen=True)
class ReadyRanks:
    """Ranks that have loaded a model, and what a measurement needs to know about them."""

    identity: Identity
    limits: Limits
    link: Link
    executor: Executor
    now: Callable[[], float]
    """The clock that times steps, in seconds."""
    waited_s: Callable[[float], float] = lambda passed_s: 0.0
    """For how many of the ``passed_s`` seconds since the last call the ranks waited for cores, as
    far as that is known."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        ready: Ready,
        executor: Executor,
        now: Callable[[], float],
    ) -> ReadyRanks:
        identity = Identity.of(
            model,
            hardware=ready.hardware,
            dtype=ready.dtype,
            block_size=config.kv_cache.block_size,
            parallel=config.parallel,
        )
        limits = Limits.of(config, model, ready.num_blocks)
        waits = CoreWaits(ready.local_pids)
        return cls(identity, limits, link_of(ready), executor, now, waits.since_last)


@dataclass(frozen=True)
class Measurement:
    profile: LatencyProfile
    held_out: list[Sample]
    """Iterations that were not used for the fit."""


def link_of(ready: Ready) -> Link:
    """The link to the host, as the ranks measured it."""
    return Link(ready.block_out_s, ready.block_in_s)


def measure_briefly(ranks: ReadyRanks) -> LatencyProfile:
    """A rough profile, in at most ``MAX_BRIEF_BUDGET_S`` of the ranks' own time. The engine
    corrects it while serving."""
    limits = ranks.limits
    mixes = brief_grid(limits) + random_mixes(limits, _BRIEF_MIXES, random.Random(_SEED))
    timer = _StepTimer(ranks)
    # The first step is slower than those after it.
    _, decode_s = (timer.time(((0, 1, True),)).own_s for _ in range(2))
    budget_s = min(max(_BRIEF_DECODES * decode_s, MIN_BRIEF_BUDGET_S), MAX_BRIEF_BUDGET_S)
    longest_s = max(MAX_BRIEF_BUDGET_S, BUSY_PATIENCE * budget_s)
    times = timer.times(mixes, budget_s, longest_s, lambda share: None)
    profile = _fit(ranks, _samples(mixes, times.seconds), busy=times.busy)
    return _with_scores(profile, timer, limits, _SCORED_SHARE * budget_s)


def measure_fully(ranks: ReadyRanks, progress: Progress) -> Measurement:
    """A good profile, in about ``FULL_BUDGET_S``, tested on iterations not used for the fit."""
    limits, rng = ranks.limits, random.Random(_SEED)
    held_out = random_mixes(limits, _HELD_OUT_MIXES, rng)
    training = full_grid(limits) + random_mixes(limits, _FULL_MIXES, rng)
    mixes = training + held_out
    timer = _StepTimer(ranks)
    times = timer.times(mixes, FULL_BUDGET_S, FULL_BUDGET_S, progress)
    profile = _fit(ranks, _samples(training, times.seconds), busy=times.busy)
    profile = _with_scores(profile, timer, limits, _SCORED_SHARE * FULL_BUDGET_S)
    tests = _samples(held_out, times.seconds[len(training) :])
    error = mean_error(profile, tests) if tests else None
    return Measurement(replace(profile, held_out_error=error), tests)


def _fit(ranks: ReadyRanks, samples: Sequence[Sample], *, busy: bool) -> LatencyProfile:
    limits = ranks.limits
    return replace(
        fit(ranks.identity, limits.num_blocks, ranks.link, samples),
        max_seqs=limits.max_seqs,
        max_prefill_tokens=limits.max_prefill_tokens,
        busy=busy,
    )


def _with_scores(
    profile: LatencyProfile, timer: _StepTimer, limits: Limits, budget_s: float
) -> LatencyProfile:
    """Measure what the log-probabilities of prompts take, in about ``budget_s``.

    What counts is their share of a prompt's own time, and the profile says how long that is. So
    both are equally wrong if they are measured on a busy machine.
    """
    num_tokens = min(_MOST_SCORED, limits.max_prefill_tokens)
    # With their log-probabilities, prompts are taken to last twice as long.
    while num_tokens > _LEAST_SCORED and 3 * profile.prefill_s(num_tokens) > budget_s:
        num_tokens //= 2
    if num_tokens < 2:
        return profile  # no prompt has a second token
    scores_s = timer.scores_share(num_tokens, budget_s) * profile.prefill_s(num_tokens)
    return replace(profile, scored_token_s=scores_s / (num_tokens - 1))


def _samples(mixes: Sequence[Mix], times: Sequence[float | None]) -> list[Sample]:
    """Samples of the mixes that were measured. ``times`` may be longer than ``mixes``."""
    return [
        Sample(IterationLoad.of(mix), seconds)
        for mix, seconds in zip(mixes, times, strict=False)
        if seconds is not None
    ]


class _Times(NamedTuple):
    seconds: list[float | None]
    """Of each mix; None if there was no time for it."""
    busy: bool
    """Whether other processes used the machine meanwhile."""


class _StepTimer:
    """Times single steps with random tokens: experts of a mixture are chosen by the tokens."""

    def __init__(self, ranks: ReadyRanks) -> None:
        limits = ranks.limits
        self._executor, self._now, self._waited_s = ranks.executor, ranks.now, ranks.waited_s
        self._block_size, self._kinds = limits.block_size, limits.kinds
        self._has_windows = limits.needs.has_windows
        self._tokens = random.Random(_SEED)
        self._vocab_size = int(ranks.identity.shape["vocab_size"])
        self._num_blocks = min(limits.num_blocks, max(1, _KV_TOKENS // limits.block_size))
        self._num_written = 0  # blocks [0, n) hold keys and values
        self._next_block = 0
        self._num_steps = 0

    def times(
        self, mixes: Sequence[Mix], budget_s: float, longest_s: float, progress: Progress
    ) -> _Times:
        """The shortest time of each mix.

        Each round times all mixes once, in an order of its own. So a slow spell of the machine hits
        many mixes, but few repeats of each.

        Args:
            budget_s: seconds of the ranks' own time, without waits for cores. If timings scatter,
                there are more.
            longest_s: seconds at most, whatever the machine does.
        """
        started_s = self._now()
        warm_up: list[Timing] = []
        timings: list[Timing] = []
        waited_s = 0.0

        def share_of_time() -> float:
            passed_s = self._now() - started_s
            return max((passed_s - waited_s) / budget_s, passed_s / longest_s)

        by_size = sorted(range(len(mixes)), key=lambda i: sum(count for _, count, _ in mixes[i]))
        for index in by_size:
            if share_of_time() > _WARM_UP_SHARE and warm_up:
                break
            warm_up.append(self.time(mixes[index], index))
            waited_s += warm_up[-1].waited_s
            progress(min(1.0, share_of_time()))
        first = shortest_seconds(warm_up)
        for index in self._rounds(first):
            is_over = self._now() - started_s >= longest_s
            if is_over or (share_of_time() >= 1.0 and not do_scatter(timings)):
                break
            timings.append(self.time(mixes[index], index))
            waited_s += timings[-1].waited_s
            progress(min(1.0, share_of_time()))
        progress(1.0)
        seconds = first | shortest_seconds(timings)
        busy = show_load(warm_up, timings)
        return _Times([seconds.get(index) for index in range(len(mixes))], busy)

    def _rounds(self, first: Mapping[int, float]) -> Iterator[int]:
        """Yields the mix to time next; ``first`` has the seconds of each in the warm-up."""
        rng = random.Random(_SEED)
        longest_s = _LONG * statistics.median(first.values())
        for number in range(_MAX_ROUNDS):
            order = [
                index
                for index, seconds in first.items()
                if number % _LONG_PERIOD == 0 or seconds <= longest_s
            ]
            rng.shuffle(order)
            yield from order

    def scores_share(self, num_tokens: int, budget_s: float) -> float:
        """By what share of its own time a prompt takes longer with log-probabilities.

        Args:
            budget_s: when to stop, once it is known.
        """
        mix = ((0, num_tokens, True),)
        started_s = self._now()
        self.time(mix, scores=True)  # the first step is slower than those after it
        timings: list[Timing] = []
        for _ in range(_SCORED_ROUNDS):
            timings += [self.time(mix, number, scores=number == 1) for number in (0, 1)]
            if self._now() - started_s > budget_s:
                break
        shortest_s = shortest_seconds(timings)
        return max(0.0, shortest_s[1] / shortest_s[0] - 1)

    def time(self, mix: Mix, number: int = 0, *, scores: bool = False) -> Timing:
        """Run one step of this mix.

        Args:
            scores: also compute the log-probabilities of its first job's tokens but the first.
        """
        step = self._step(mix)
        if scores:
            wanted = step.token_ids[4 : 4 * mix[0][1]]
            step.prompt_rows = [PromptRows(0, 0, wanted, MAX_LOGPROBS)]
        self._waited_s(0.0)  # waits before the step do not count
        started_s = self._now()
        self._executor.submit(step)
        while self._executor.collect() is None:
            pass
        wall_s = self._now() - started_s
        return Timing(number, wall_s, min(self._waited_s(wall_s), (1 - _LEAST_SHARE) * wall_s))

    def _step(self, mix: Mix) -> Step:
        # A step's order of jobs: decodes, prefills that end here, prefills that go on later.
        ordered = sorted(mix, key=lambda job: (not job[2], job[1] > 1))
        self._num_steps += 1
        return Step.of(
            self._num_steps,
            [
                (start, self._random_tokens(count), *self._tables(start, count))
                for start, count, _ in ordered
            ],
            num_partial=sum(not samples for *_, samples in ordered),
            first_blocks=[
                [kind.first_seen(start, self._block_size) for start, *_ in ordered]
                for kind in self._kinds
                if self._has_windows
            ],
        )

    def _random_tokens(self, count: int) -> list[int]:
        return [self._tokens.randrange(self._vocab_size) for _ in range(count)]

    def _tables(self, start: int, count: int) -> list[list[int]]:
        """A job's block table for each kind of layers."""
        end = -(-(start + count) // self._block_size)
        firsts = (kind.first_seen(start, self._block_size) for kind in self._kinds)
        return [
            self._table(start, kind.num_groups * (end - first))
            for kind, first in zip(self._kinds, firsts, strict=True)
        ]

    def _table(self, start: int, needed: int) -> list[int]:
        """A block table that takes blocks in turn. A job that reads KV gets only written blocks.

        Reading memory that was never written is faster than reading real KV. Jobs may share blocks,
        because values do not matter.
        """
        if start == 0:
            self._num_written = max(
                self._num_written, min(self._num_blocks, self._next_block + needed)
            )
            span = self._num_blocks
        else:
            span = max(1, self._num_written)
        table = [(self._next_block + index) % span for index in range(needed)]
        self._next_block = (self._next_block + needed) % span
        return table
