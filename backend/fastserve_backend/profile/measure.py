"""Measure the latency profile on real ranks, or read it from the cache of an earlier start."""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.executor.base import Executor
from fastserve_backend.profile.drift import typical_seconds
from fastserve_backend.profile.fit import Sample, fit, mean_error
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.latency import Identity, LatencyProfile
from fastserve_backend.profile.loads import Limits, Mix, brief_grid, full_grid, random_mixes
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.rank_protocol.messages import Ready, Step
from fastserve_backend.system.cache_directory import cache_directory

# Keeps the start short: so many times a decode of one job, but at least and at most so long. A slow
# model is measured with shorter prompts and fewer repeats.
_BRIEF_DECODES = 100
MIN_BRIEF_BUDGET_S, MAX_BRIEF_BUDGET_S = 1.0, 5.0
# For a user who asked for a profile, and waits for it.
FULL_BUDGET_S = 80.0
# After this many repeats the medians hardly move.
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
# As in serving, this much KV does not fit in a processor's caches. It is written in a few seconds.
_KV_TOKENS = 8192
_SEED = 17
_ANEW = "the latency profile is measured anew at each start: %s"
_log = logging.getLogger(__name__)

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
        return cls(identity, limits, link_of(ready), executor, now)


@dataclass(frozen=True)
class Measurement:
    profile: LatencyProfile
    held_out: list[Sample]
    """Iterations that were not used for the fit."""


def profiles_directory() -> Path:
    """Directory of profiles in the user's cache; it need not exist.

    Raises:
        ConfigError: there is no cache.
    """
    return cache_directory("profiles")


def cache_path(identity: Identity) -> Path:
    """File that the engine reads at its start, if it exists.

    Raises:
        ConfigError: there is no cache.
    """
    return profiles_directory() / f"{identity.key}.json"


def cache_path_if_any(identity: Identity) -> Path | None:
    """As ``cache_path``, but warns and returns None if there is no cache."""
    try:
        return cache_path(identity)
    except ConfigError as error:
        _log.warning(_ANEW, error)
        return None


def link_of(ready: Ready) -> Link:
    """The link to the host, as the ranks measured it."""
    return Link(ready.block_out_s, ready.block_in_s)


def load_or_measure(path: Path | None, ranks: ReadyRanks) -> LatencyProfile:
    """The profile in ``path``, or a brief measurement, which is saved there for the next start.

    A profile in ``path`` is not used if its batches or prefills were smaller than the ranks' limits
    allow. None: measure, and save nothing.
    """
    identity, limits = ranks.identity, ranks.limits
    if path is not None and path.exists():
        try:
            profile = LatencyProfile.load(path)
        except ConfigError as error:
            _log.warning("%s", error)
        else:
            covers = (
                profile.max_seqs >= limits.max_seqs
                and profile.max_prefill_tokens >= limits.max_prefill_tokens
            )
            if profile.identity.key == identity.key and covers:
                return _with_link(profile, ranks.link, path)
    _log.info("measuring the latency profile of %s on %s", identity.model, identity.hardware)
    profile = measure_briefly(ranks)
    if path is not None:
        try:
            profile.save(path)
        except OSError as error:
            _log.warning(_ANEW, error)
    return profile


def _with_link(profile: LatencyProfile, link: Link, path: Path) -> LatencyProfile:
    """Add the link to a profile of an earlier start that had no host memory to measure it."""
    if profile.link.block_out_s or not link.block_out_s:
        return profile
    profile = replace(profile, link=link)
    try:
        profile.save(path)
    except OSError as error:
        _log.warning("the latency profile keeps no speed of the link: %s", error)
    return profile


def measure_briefly(ranks: ReadyRanks) -> LatencyProfile:
    """A rough profile, in at most ``MAX_BRIEF_BUDGET_S``. The engine corrects it while serving."""
    limits = ranks.limits
    mixes = brief_grid(limits) + random_mixes(limits, _BRIEF_MIXES, random.Random(_SEED))
    timer = _StepTimer(ranks)
    # The first step is slower than those after it.
    _, decode_s = (timer.time(((0, 1, True),)) for _ in range(2))
    budget_s = min(max(_BRIEF_DECODES * decode_s, MIN_BRIEF_BUDGET_S), MAX_BRIEF_BUDGET_S)
    times = timer.times(mixes, budget_s, lambda share: None)
    return _fit(ranks, _samples(mixes, times))


def measure_fully(ranks: ReadyRanks, progress: Progress) -> Measurement:
    """A good profile, in about ``FULL_BUDGET_S``, tested on iterations not used for the fit."""
    limits, rng = ranks.limits, random.Random(_SEED)
    held_out = random_mixes(limits, _HELD_OUT_MIXES, rng)
    training = full_grid(limits) + random_mixes(limits, _FULL_MIXES, rng)
    mixes = training + held_out
    times = _StepTimer(ranks).times(mixes, FULL_BUDGET_S, progress)
    profile = _fit(ranks, _samples(training, times))
    tests = _samples(held_out, times[len(training) :])
    error = mean_error(profile, tests) if tests else None
    return Measurement(replace(profile, held_out_error=error), tests)


def _fit(ranks: ReadyRanks, samples: Sequence[Sample]) -> LatencyProfile:
    limits = ranks.limits
    return replace(
        fit(ranks.identity, limits.num_blocks, ranks.link, samples),
        max_seqs=limits.max_seqs,
        max_prefill_tokens=limits.max_prefill_tokens,
    )


def _samples(mixes: Sequence[Mix], times: Sequence[float | None]) -> list[Sample]:
    """Samples of the mixes that were measured. ``times`` may be longer than ``mixes``."""
    return [
        Sample(IterationLoad.of(mix), seconds)
        for mix, seconds in zip(mixes, times, strict=False)
        if seconds is not None
    ]


class _StepTimer:
    """Times single steps with random tokens: experts of a mixture are chosen by the tokens."""

    def __init__(self, ranks: ReadyRanks) -> None:
        limits = ranks.limits
        self._executor, self._now = ranks.executor, ranks.now
        self._block_size, self._kinds = limits.block_size, limits.kinds
        self._has_windows = limits.needs.has_windows
        self._tokens = random.Random(_SEED)
        self._vocab_size = int(ranks.identity.shape["vocab_size"])
        self._num_blocks = min(limits.num_blocks, max(1, _KV_TOKENS // limits.block_size))
        self._num_written = 0  # blocks [0, n) hold keys and values
        self._next_block = 0
        self._num_steps = 0

    def times(
        self, mixes: Sequence[Mix], budget_s: float, progress: Progress
    ) -> list[float | None]:
        """Typical seconds of each mix; None if there was no time for it.

        Each round times all mixes once, in an order of its own. So a slow spell of the machine hits
        many mixes, but few repeats of each.
        """
        started_s = self._now()

        def share_of_time() -> float:
            return (self._now() - started_s) / budget_s

        by_size = sorted(range(len(mixes)), key=lambda i: sum(count for _, count, _ in mixes[i]))
        first: dict[int, float] = {}
        for index in by_size:
            if share_of_time() > _WARM_UP_SHARE and first:
                break
            first[index] = self.time(mixes[index])
            progress(share_of_time())
        timings: list[tuple[int, float]] = []
        for index in self._rounds(first):
            if share_of_time() >= 1.0:
                break
            timings.append((index, self.time(mixes[index])))
            progress(share_of_time())
        progress(1.0)
        seconds = first | typical_seconds(timings)
        return [seconds.get(index) for index in range(len(mixes))]

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

    def time(self, mix: Mix) -> float:
        """Seconds of one step."""
        step = self._step(mix)
        started_s = self._now()
        self._executor.submit(step)
        while self._executor.collect() is None:
            pass
        return self._now() - started_s

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
