"""Measure the latency profile on the real ranks, or read it from the cache of an earlier start."""

from __future__ import annotations

import hashlib
import logging
import statistics
from array import array
from collections.abc import Callable
from pathlib import Path

from fastserve_backend.executor.base import Executor
from fastserve_backend.profile.latency import DecodeSample, LatencyProfile, PrefillSample, fit
from fastserve_backend.worker.messages import Step

# Prompt lengths and batch sizes that show the shape of the curve; the shortest come first, so that
# a slow machine that runs out of time still has three of each.
PREFILL_TOKENS = (8, 32, 128, 512, 1024)
DECODE_BATCHES = (1, 4, 16, 64)
DECODE_CONTEXTS = (16, 128, 512)
# Profiling stops taking longer samples once it has spent this long: a start must stay short.
BUDGET_S = 4.0
REPEATS = 3
_log = logging.getLogger(__name__)


def load_or_measure(
    directory: Path,
    key: str,
    executor: Executor,
    now: Callable[[], float],
    *,
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    max_seqs: int,
) -> LatencyProfile:
    """The profile for ``key`` (model, hardware, types), measured at most once a machine."""
    path = directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    profile = LatencyProfile.load(path, key)
    if profile is not None:
        return profile
    _log.info("measuring the latency profile of %s", key)
    bench = _Bench(executor, now, block_size, min(max_tokens, num_blocks * block_size))
    profile = fit(key, bench.prefills(), bench.decodes(max_seqs))
    try:
        profile.save(path)
    except OSError as error:
        _log.warning("the latency profile is measured anew at each start: %s", error)
    return profile


class _Bench:
    """Times single steps on random tokens. Jobs share blocks: the values do not matter here."""

    def __init__(
        self, executor: Executor, now: Callable[[], float], block_size: int, max_tokens: int
    ) -> None:
        self._executor = executor
        self._now = now
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._step_id = 0

    def prefills(self) -> list[PrefillSample]:
        max_tokens = self._max_tokens
        started = self._now()
        samples: list[PrefillSample] = []
        lengths = [length for length in PREFILL_TOKENS if length <= max_tokens]
        if len(lengths) < 3:
            lengths = [max(1, max_tokens // 4), max(1, max_tokens // 2), max_tokens]
        for length in lengths:
            if len(samples) >= 3 and self._now() - started > BUDGET_S:
                break
            samples.append(PrefillSample(length, self._time(1, length, 0)))
        return samples

    def decodes(self, max_seqs: int) -> list[DecodeSample]:
        started = self._now()
        samples: list[DecodeSample] = []
        for batch in sorted({min(batch, max_seqs) for batch in DECODE_BATCHES}):
            for context in (min(self._max_tokens - 1, context) for context in DECODE_CONTEXTS):
                if len(samples) >= 3 and self._now() - started > BUDGET_S:
                    break
                seconds = self._time(batch, 1, context)
                samples.append(DecodeSample(batch, batch * (context + 1), seconds))
        return samples

    def _time(self, num_jobs: int, query_len: int, start: int) -> float:
        """Median seconds of the step, after one that warms it up."""
        blocks = -(-(start + query_len) // self._block_size)
        table = array("i", range(blocks))
        times = []
        for repeat in range(REPEATS + 1):
            self._step_id += 1
            step = Step(
                step_id=self._step_id,
                num_decodes=num_jobs if query_len == 1 else 0,
                token_ids=array("i", [3] * (num_jobs * query_len)).tobytes(),
                query_lens=array("i", [query_len] * num_jobs).tobytes(),
                starts=array("i", [start] * num_jobs).tobytes(),
                block_counts=array("i", [blocks] * num_jobs).tobytes(),
                block_ids=(table * num_jobs).tobytes(),
                sampling=None,
            )
            started = self._now()
            self._executor.submit(step)
            self._executor.collect()
            if repeat > 0:
                times.append(self._now() - started)
        return statistics.median(times)
