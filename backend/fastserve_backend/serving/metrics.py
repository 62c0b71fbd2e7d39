"""Custom metrics on Triton's metrics port, published by a thread of their own.

Setting a metric is a message to the server and back. It typically takes 70 µs, but milliseconds
when all cores are busy, and Triton 24.10 holds the interpreter's lock meanwhile. So the engine and
the emitters only keep numbers, and this thread publishes those that changed: twice a second while
there are jobs, and soon after a request arrives or ends. Histograms, which have the most values,
are published twice a second only. The thread pauses after each message, so that the engine gets the
lock between two messages.

docs/metrics.md defines every metric.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from fastserve_backend.engine.engine import Engine
from fastserve_backend.job import FinishReason
from fastserve_backend.metrics.counters import EngineSnapshot
from fastserve_backend.metrics.latency_histograms import Histogram, LatencyHistograms
from fastserve_backend.metrics.objectives import Attainment
from fastserve_backend.serving import prediction_metrics
from fastserve_backend.serving.metric_histograms import Call, PublishedHistogram, publish_histogram

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_LEAST_INTERVAL_S = 0.1
# Without jobs little changes, but ranks may be restarted.
_IDLE_INTERVAL_S = 2.0
# Long enough for a thread that waits for the interpreter's lock to get it.
_PAUSE_S = 50e-6

# By Prometheus's convention the names of counters end so; all others are gauges.
_COUNTER_SUFFIX = "_total"

_DESCRIPTIONS = {
    "fastserve_jobs": "Unfinished jobs by state",
    "fastserve_queue_jobs": "Unfinished jobs by level of the scheduler's queues, 0 the highest",
    "fastserve_priority_jobs": "Unfinished jobs by priority, the lowest runs first",
    "fastserve_kv_blocks": "KV cache blocks by tier and state",
    "fastserve_kv_shared_blocks": "Used KV cache blocks that several jobs have",
    "fastserve_kv_usage_ratio": "Share of the device's KV cache blocks in use, from 0 to 1",
    "fastserve_cache_config_info": "Always 1; its labels are the size of the device's KV cache",
    "fastserve_prompt_tokens_total": "Prompt tokens of accepted jobs",
    "fastserve_prefix_cached_tokens_total": "Tokens of which other jobs had the KV",
    "fastserve_sessions_held": "Paused sessions whose KV is held",
    "fastserve_session_blocks": "KV cache blocks held for paused sessions, by tier",
    "fastserve_session_tokens_total": "Prompt tokens of sessions' turns, by whether KV was held",
    "fastserve_generation_tokens_total": "Generated tokens",
    "fastserve_iterations_total": "Iterations of the model",
    "fastserve_preemptions_total": "Times that a running job was set aside for another",
    "fastserve_demotions_total": "Times that a job sank to a lower queue",
    "fastserve_promotions_total": "Times that a starving job rose to the highest queue",
    "fastserve_swap_bytes_total": "KV copied from the device to the host (out) and back (in)",
    "fastserve_swap_bytes_avoided_total": "KV that the host had already when a job was swapped out",
    "fastserve_swap_stall_seconds_total": "Time in which all jobs that could run awaited copies",
    "fastserve_disk_bytes_total": "KV of sessions written to the disk (out) and read back (in)",
    "fastserve_disk_failures_total": "Failed writes and reads of KV on the disk",
    "fastserve_requests_total": "Ended jobs by finish reason",
    "fastserve_requests_rejected_total": "Requests refused before they became jobs",
    "fastserve_slo_attained_total": "Completed jobs that kept their latency objective",
    "fastserve_slo_missed_total": "Completed jobs that missed their latency objective",
    "fastserve_tenant_tokens_total": "Prompt and generated tokens by tenant",
    "fastserve_worker_restarts_total": "Times that all ranks were started anew, one having died",
}

# name → description, histogram of the engine, whether it has a value for each token (else each job)
_HISTOGRAMS: dict[str, tuple[str, Callable[[LatencyHistograms], Histogram], bool]] = {
    "fastserve_time_to_first_token_seconds": (
        "Time from a job's arrival to its first token",
        lambda latencies: latencies.time_to_first_token,
        False,
    ),
    "fastserve_inter_token_seconds": (
        "Time from one token of a job to its next",
        lambda latencies: latencies.inter_token,
        True,
    ),
    "fastserve_e2e_seconds": (
        "Time from arrival to the last token, of completed jobs",
        lambda latencies: latencies.e2e,
        False,
    ),
    "fastserve_queue_seconds": (
        "Part of the end-to-end time in which no iteration ran the job",
        lambda latencies: latencies.queue,
        False,
    ),
    "fastserve_normalized_latency_seconds": (
        "End-to-end time divided by the number of generated tokens",
        lambda latencies: latencies.normalized_latency,
        False,
    ),
}

# The ends of ``fastserve_priority_jobs`` count all priorities beyond them.
_LAST_PRIORITIES = -3, 3

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
        descriptions = _DESCRIPTIONS
        if engine.predictions is not None:
            descriptions = descriptions | prediction_metrics.DESCRIPTIONS
        self._families = {name: _family(name, text) for name, text in descriptions.items()}
        self._histograms: list[tuple[Histogram, PublishedHistogram]] = []
        for name, (description, pick, per_token) in _HISTOGRAMS.items():
            histogram = pick(engine.counters.latencies)
            self._add_histogram(name, description, histogram, per_token=per_token)
        if engine.predictions is not None:
            for name, description, histogram in prediction_metrics.histograms(engine.predictions):
                self._add_histogram(name, description, histogram, per_token=False)
        self._histograms_due_s = 0.0
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._published: dict[tuple[str, ...], float] = {}
        self._activity = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def on_request_change(self) -> None:
        """A request has arrived or ended. Thread-safe, returns at once."""
        self._activity.set()

    def close(self) -> None:
        """Publish a last time and end the thread."""
        self._closed.set()
        self._activity.set()
        self._thread.join()

    def _add_histogram(
        self, name: str, description: str, histogram: Histogram, *, per_token: bool
    ) -> None:
        published = publish_histogram(
            name, description, self._labels, histogram, per_token=per_token
        )
        self._histograms.append((histogram, published))

    def _run(self) -> None:
        # Triton may answer only after the model's initialize has returned.
        self._activity.wait(_IDLE_INTERVAL_S)
        while True:
            last = self._closed.is_set()
            wait_s = _INTERVAL_S
            try:
                wait_s = self._publish()
            except Exception:
                logger.exception("publishing metrics failed")
            if last:
                return
            self._closed.wait(_LEAST_INTERVAL_S)
            self._activity.wait(wait_s)
            self._activity.clear()

    def _publish(self) -> float:
        """Returns the seconds until the next time, beyond the least interval; requests that arrive
        or end shorten them."""
        snapshot = self._engine.snapshot()
        samples = list(self._samples(snapshot))
        busy = snapshot.running + snapshot.waiting > 0
        now = time.monotonic()
        if not busy or now >= self._histograms_due_s:
            self._histograms_due_s = now + _INTERVAL_S
            for histogram, published in self._histograms:
                for call in published.changes(histogram.take()):
                    self._send(call)
        for name, labels, value in samples:
            key = (name, *labels.values())
            old = self._published.get(key)
            if value == old:
                continue
            metric = self._metrics.get(key)
            if metric is None:
                metric = self._families[name].Metric(labels=self._labels | labels)
                self._metrics[key] = metric
            if name.endswith(_COUNTER_SUFFIX):
                self._send(partial(metric.increment, value - (old or 0.0)))
            else:
                self._send(partial(metric.set, value))
            self._published[key] = value
        if busy:
            return _INTERVAL_S
        # Jobs that ended while a step ran keep their blocks until the step ends.
        return _IDLE_INTERVAL_S if snapshot.free_blocks == snapshot.num_blocks else 0.0

    def _send(self, call: Call) -> None:
        call()
        self._closed.wait(_PAUSE_S)

    def _samples(self, snapshot: EngineSnapshot) -> Iterator[_Sample]:
        """The state comes last: a scrape that finds the server idle finds final counters."""
        counters = self._engine.counters
        yield "fastserve_prompt_tokens_total", {}, counters.prompt_tokens
        yield "fastserve_prefix_cached_tokens_total", {}, counters.prefix_cached_tokens
        for kv, number in (
            ("held", counters.session_hit_tokens),
            ("missing", counters.session_miss_tokens),
        ):
            yield "fastserve_session_tokens_total", {"kv": kv}, number
        yield "fastserve_generation_tokens_total", {}, counters.generation_tokens
        yield "fastserve_iterations_total", {}, counters.iterations
        yield "fastserve_preemptions_total", {}, counters.preemptions
        yield "fastserve_demotions_total", {}, snapshot.num_demotions
        yield "fastserve_promotions_total", {}, snapshot.num_promotions
        yield "fastserve_swap_bytes_total", {"direction": "out"}, counters.swap_out_bytes
        yield "fastserve_swap_bytes_total", {"direction": "in"}, counters.swap_in_bytes
        yield "fastserve_swap_bytes_avoided_total", {}, counters.swap_avoided_bytes
        yield "fastserve_swap_stall_seconds_total", {}, counters.swap_stall_s
        yield "fastserve_disk_bytes_total", {"direction": "out"}, counters.disk_write_bytes
        yield "fastserve_disk_bytes_total", {"direction": "in"}, counters.disk_read_bytes
        yield "fastserve_disk_failures_total", {}, counters.disk_failures
        yield "fastserve_worker_restarts_total", {}, counters.worker_restarts
        if self._engine.predictions is not None:
            yield from prediction_metrics.samples(self._engine.predictions)
        for reason in FinishReason:
            number = counters.finished[reason.value]
            yield "fastserve_requests_total", {"finish_reason": reason.value}, number
        for objective in Attainment._fields:
            labels = {"objective": objective}
            yield "fastserve_slo_attained_total", labels, counters.slo_attained[objective]
            yield "fastserve_slo_missed_total", labels, counters.slo_missed[objective]
        # A copy, because the engine's thread may add a tenant meanwhile.
        for tenant, number in dict(counters.tenant_tokens).items():
            yield "fastserve_tenant_tokens_total", {"tenant": tenant}, number
        yield "fastserve_jobs", {"state": "running"}, snapshot.running
        yield "fastserve_jobs", {"state": "waiting"}, max(0, snapshot.waiting - snapshot.swapped)
        yield "fastserve_jobs", {"state": "swapped"}, snapshot.swapped
        for level, size in enumerate(snapshot.level_sizes):
            yield "fastserve_queue_jobs", {"level": str(level)}, size
        for priority, size in _bounded(snapshot.priority_jobs).items():
            yield "fastserve_priority_jobs", {"priority": str(priority)}, size
        used = snapshot.num_blocks - snapshot.free_blocks
        yield "fastserve_kv_usage_ratio", {}, used / snapshot.num_blocks
        yield "fastserve_cache_config_info", _cache_config(snapshot), 1
        yield "fastserve_kv_blocks", {"tier": "device", "state": "used"}, used
        yield "fastserve_kv_blocks", {"tier": "device", "state": "free"}, snapshot.free_blocks
        used = snapshot.num_host_blocks - snapshot.free_host_blocks
        yield "fastserve_kv_blocks", {"tier": "host", "state": "used"}, used
        yield "fastserve_kv_blocks", {"tier": "host", "state": "free"}, snapshot.free_host_blocks
        for tier, shared in (
            ("device", snapshot.shared_blocks),
            ("host", snapshot.shared_host_blocks),
        ):
            yield "fastserve_kv_shared_blocks", {"tier": tier}, shared
        yield "fastserve_sessions_held", {}, snapshot.sessions_held
        yield "fastserve_session_blocks", {"tier": "device"}, snapshot.held_blocks
        yield "fastserve_session_blocks", {"tier": "host"}, snapshot.held_host_blocks
        yield "fastserve_session_blocks", {"tier": "disk"}, snapshot.held_disk_blocks
        yield "fastserve_requests_rejected_total", {}, self._num_rejected()


def _cache_config(snapshot: EngineSnapshot) -> dict[str, str]:
    """The labels that endpoint pickers of inference gateways read. A block has all layers here."""
    return {
        "block_size": str(snapshot.block_size),
        "num_gpu_blocks": str(snapshot.num_blocks // snapshot.num_groups),
    }


def _bounded(priority_jobs: Mapping[int, int]) -> dict[int, int]:
    """Jobs by priority, for each of a few priorities."""
    first, last = _LAST_PRIORITIES
    bounded = dict.fromkeys(range(first, last + 1), 0)
    for priority, number in priority_jobs.items():
        bounded[max(first, min(priority, last))] += number
    return bounded


def _family(name: str, description: str) -> Any:
    family = pb_utils.MetricFamily
    kind = family.COUNTER if name.endswith(_COUNTER_SUFFIX) else family.GAUGE
    return family(name=name, description=description, kind=kind)
