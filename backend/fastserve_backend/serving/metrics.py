"""Custom metrics on Triton's metrics port, published from a thread of their own.

Setting a metric is a message to the server and back, typically 70 µs, but milliseconds where all
cores are busy, and Triton 24.10 holds the interpreter's lock meanwhile. So neither the engine nor
the emitters do it, and it is done seldom: they keep plain numbers, and this thread publishes those
that changed, twice a second while there are jobs and soon after a request came or ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import triton_python_backend_utils as pb_utils

from fastserve_backend.counters import EngineSnapshot
from fastserve_backend.engine import Engine
from fastserve_backend.job import FinishReason

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_LEAST_INTERVAL_S = 0.1
# Without jobs little can change, but ranks may be restarted.
_IDLE_INTERVAL_S = 2.0

_GAUGES = {
    "fastserve_jobs": "Unfinished jobs by state",
    "fastserve_queue_jobs": "Unfinished jobs by level of the scheduler's queues, 0 the highest",
    "fastserve_kv_blocks": "KV cache blocks by tier and state",
}
_COUNTERS = {
    "fastserve_prompt_tokens_total": "Prompt tokens of accepted jobs",
    "fastserve_generation_tokens_total": "Generated tokens",
    "fastserve_iterations_total": "Iterations of the model",
    "fastserve_preemptions_total": "Times that a running job was set aside for another",
    "fastserve_swap_bytes_total": "KV copied from the device to the host (out) and back (in)",
    "fastserve_swap_bytes_avoided_total": "KV that the host had already when a job was swapped out",
    "fastserve_swap_stall_seconds_total": "Time in which all jobs that could run awaited copies",
    "fastserve_requests_total": "Ended jobs by finish reason",
    "fastserve_requests_rejected_total": "Requests refused before they became jobs",
    "fastserve_worker_restarts_total": "Times that all ranks were started anew, one having died",
}

# (family, labels, value)
_Sample = tuple[str, dict[str, str], float]


class MetricsPublisher:
    """Publishes the engine's numbers, labelled with the Triton model and its version.

    Args:
        num_rejected: requests refused so far.
    """

    def __init__(
        self, engine: Engine, model: str, version: str, num_rejected: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._labels = {"model": model, "version": version}
        self._num_rejected = num_rejected
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=description, kind=kind)
            for kind, descriptions in (
                (pb_utils.MetricFamily.GAUGE, _GAUGES),
                (pb_utils.MetricFamily.COUNTER, _COUNTERS),
            )
            for name, description in descriptions.items()
        }
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._published: dict[tuple[str, ...], float] = {}
        self._activity = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """A request came or ended. Thread-safe, returns at once."""
        self._activity.set()

    def close(self) -> None:
        """Publishes a last time and ends the thread."""
        self._closed.set()
        self._activity.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            last = self._closed.is_set()
            busy = True
            try:
                busy = self._publish()
            except Exception:
                logger.exception("publishing metrics failed")
            if last:
                return
            self._closed.wait(_LEAST_INTERVAL_S)
            self._activity.wait(_INTERVAL_S if busy else _IDLE_INTERVAL_S)
            self._activity.clear()

    def _publish(self) -> bool:
        """Whether jobs are left."""
        snapshot = self._engine.snapshot()
        for name, labels, value in self._samples(snapshot):
            key = (name, *labels.values())
            old = self._published.get(key)
            if value == old:
                continue
            metric = self._metrics.get(key)
            if metric is None:
                metric = self._families[name].Metric(labels=self._labels | labels)
                self._metrics[key] = metric
            if name in _COUNTERS:
                metric.increment(value - (old or 0.0))
            else:
                metric.set(value)
            self._published[key] = value
        return snapshot.running + snapshot.waiting > 0

    def _samples(self, snapshot: EngineSnapshot) -> Iterator[_Sample]:
        counters = self._engine.counters
        yield "fastserve_jobs", {"state": "running"}, snapshot.running
        yield "fastserve_jobs", {"state": "waiting"}, max(0, snapshot.waiting - snapshot.swapped)
        yield "fastserve_jobs", {"state": "swapped"}, snapshot.swapped
        for level, size in enumerate(snapshot.level_sizes):
            yield "fastserve_queue_jobs", {"level": str(level)}, size
        used = snapshot.num_blocks - snapshot.free_blocks
        yield "fastserve_kv_blocks", {"tier": "device", "state": "used"}, used
        yield "fastserve_kv_blocks", {"tier": "device", "state": "free"}, snapshot.free_blocks
        used = snapshot.num_host_blocks - snapshot.free_host_blocks
        yield "fastserve_kv_blocks", {"tier": "host", "state": "used"}, used
        yield "fastserve_kv_blocks", {"tier": "host", "state": "free"}, snapshot.free_host_blocks
        yield "fastserve_prompt_tokens_total", {}, counters.prompt_tokens
        yield "fastserve_generation_tokens_total", {}, counters.generation_tokens
        yield "fastserve_iterations_total", {}, counters.iterations
        yield "fastserve_preemptions_total", {}, counters.preemptions
        yield "fastserve_swap_bytes_total", {"direction": "out"}, counters.swap_out_bytes
        yield "fastserve_swap_bytes_total", {"direction": "in"}, counters.swap_in_bytes
        yield "fastserve_swap_bytes_avoided_total", {}, counters.swap_avoided_bytes
        yield "fastserve_swap_stall_seconds_total", {}, counters.swap_stall_s
        for reason in FinishReason:
            number = counters.finished[reason.value]
            yield "fastserve_requests_total", {"finish_reason": reason.value}, number
        yield "fastserve_requests_rejected_total", {}, self._num_rejected()
        yield "fastserve_worker_restarts_total", {}, counters.worker_restarts
