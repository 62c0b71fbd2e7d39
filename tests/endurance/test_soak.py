"""After an hour's worth of requests no process has grown or restarted, and each request has ended
once.

A server and a gateway, in processes of their own, get 20 requests a second of every kind: streams,
whole answers, chats, forms, clients that go away, what is refused, and bursts that need more KV
than the device has. `make endurance` has ten minutes of it, as many requests as come in an hour at
3.3 a second; `make test` has seconds. After each round all is idle, and what each process has is
read.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from byte_tokenizer import NUM_ASCII_TOKENS, save_byte_tokenizer
from fastserve_backend.config import EngineConfig
from fastserve_backend.job import FinishReason
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.runtime import RuntimeDirectory
from launched import leaving_nothing, server_of, start_launcher
from mixed_load import MixedLoad
from process_holdings import Holdings
from running_gateway import running_gateway
from serving_client import ended_jobs, metric, unfinished_jobs, used_blocks
from tiny_model import TINY_OPT, engine_options
from waiting import wait_for

pytestmark = pytest.mark.timeout(1200)

REQUESTS_PER_S = 20.0
ROUND_S, NUM_ROUNDS, WARM_UP_ROUNDS = 60.0, 10, 3
SHORT_ROUND_S, NUM_SHORT_ROUNDS, MOST_SHORT_ROUNDS = 2.5, 2, 6
# Allowed growth: a share of the memory after the warm-up, or this much if that is more.
MOST_GROWTH, MOST_SHORT_GROWTH, GRAIN_BYTES = 0.05, 0.5, 1 << 20
# Time for closed connections and idle threads to go.
SETTLE_S, SETTLE_TIMEOUT_S = 0.5, 60.0
MIB = 1 << 20
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# Words in the processes' command lines.
PROCESSES = {
    "tritonserver": "bin/tritonserver",
    "stub": "triton_python_backend_stub",
    "rank": "fastserve_backend.worker",
    "grammars": "fastserve_backend.grammars",
}
NAMES = ("launcher", *PROCESSES, "gateway")


@dataclass(frozen=True)
class Reading:
    """Holdings of the idle processes by name, and the names of their shared memory."""

    holdings: dict[str, Holdings]
    shared_memory: frozenset[str]

    def counts(self) -> object:
        """The counts that must stay constant."""
        return self.shared_memory, {
            name: (one.pid, one.num_descriptors, one.num_threads)
            for name, one in self.holdings.items()
        }


@dataclass(frozen=True)
class Soak:
    sent: Counter[str]
    swap_bytes: float
    worker_restarts: float
    readings: list[Reading]
    """Readings after the warm-up and after each round."""


@pytest.fixture(scope="module")
def soak(is_long: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    directory = tmp_path_factory.mktemp("soak")
    config = directory / "engine.yaml"
    config.write_text(_config(directory / "model").to_yaml(), encoding="utf-8")
    with leaving_nothing() as started:
        launcher = start_launcher(config, directory / "server.log")
        try:
            started.append(server_of(launcher))
            (runtime, endpoints), log = started[0], directory / "gateway.log"
            with running_gateway(f"grpc://{endpoints.grpc_url}", log) as gateway:
                pids = {"launcher": launcher.pid, "gateway": gateway.process.pid}
                load = MixedLoad(endpoints, gateway.url)
                yield _soak(load, runtime, endpoints, pids, is_long=is_long)
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(60.0) == 0
        finally:
            launcher.kill()


def _config(model: Path) -> EngineConfig:
    model.mkdir()
    # So few tokens, each with one text, that the emitters soon keep the tensors of all of them.
    sizes = {"vocab_size": NUM_ASCII_TOKENS}
    (model / "config.json").write_text(json.dumps(TINY_OPT | sizes), encoding="utf-8")
    save_byte_tokenizer(model, is_ascii=True)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    # So little swap space that a burst fills it.
    small = {"device_blocks": 80, "swap_space_gib": 0.01}
    return EngineConfig().with_keys(**engine_options(model) | small)


def _soak(
    load: MixedLoad,
    runtime: RuntimeDirectory,
    endpoints: Endpoints,
    pids: dict[str, int],
    *,
    is_long: bool,
) -> Soak:
    round_s = ROUND_S if is_long else SHORT_ROUND_S
    num_rounds = NUM_ROUNDS if is_long else NUM_SHORT_ROUNDS
    num_warm = WARM_UP_ROUNDS if is_long else 1
    readings: list[Reading] = []
    number = 0
    while number < num_rounds or (
        # A pool of threads may have grown with the last round's load. A leak goes on.
        not is_long
        and number < MOST_SHORT_ROUNDS
        and readings[-1].counts() != readings[-2].counts()
    ):
        number += 1
        asyncio.run(load.run(round_s, REQUESTS_PER_S))
        wait_for(lambda: _is_over(load, endpoints), SETTLE_TIMEOUT_S)
        if number >= num_warm:
            readings.append(_settled_reading(runtime, pids))
    url = endpoints.metrics_url
    swapped = metric(url, "fastserve_swap_bytes_total", direction="out")
    restarts = metric(url, "fastserve_worker_restarts_total")
    return Soak(load.sent, swapped, restarts, readings)


def _is_over(load: MixedLoad, endpoints: Endpoints) -> bool:
    """Whether the server has counted each job as ended once, and holds nothing of any job."""
    url = endpoints.metrics_url
    num_ended = sum(ended_jobs(url, reason.value) for reason in FinishReason)
    num_refused = metric(url, "fastserve_requests_rejected_total")
    # The launcher's probe was a job, too.
    assert num_ended <= load.num_jobs + 1
    assert num_refused <= load.num_refused
    is_all = (num_ended, num_refused) == (load.num_jobs + 1, load.num_refused)
    return is_all and unfinished_jobs(url) == 0 and used_blocks(url) == 0


def _settled_reading(runtime: RuntimeDirectory, pids: dict[str, int]) -> Reading:
    """A reading once nothing changes any more, as processes drop closed connections a moment
    later."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    before = _read(runtime, pids)
    while True:
        time.sleep(SETTLE_S)
        now = _read(runtime, pids)
        if now.counts() == before.counts() or time.monotonic() > deadline_s:
            return now
        before = now


def _read(runtime: RuntimeDirectory, pids: dict[str, int]) -> Reading:
    found = dict(pids)
    for pid in _oldest_first(runtime.processes()):
        with suppress(psutil.Error):  # it has just ended
            words = " ".join(psutil.Process(pid).cmdline())
            for name, part in PROCESSES.items():
                if part in words:
                    # One that another process has just forked still has its words.
                    found.setdefault(name, pid)
    names = Path("/dev/shm").glob(f"{runtime.shared_memory_prefix}*")
    return Reading(
        {name: Holdings.of(found[name]) for name in NAMES}, frozenset(path.name for path in names)
    )


def _oldest_first(pids: list[int]) -> list[int]:
    started_s = {}
    for pid in pids:
        with suppress(psutil.Error):  # it has just ended
            started_s[pid] = psutil.Process(pid).create_time()
    return sorted(started_s, key=lambda pid: (started_s[pid], pid))


def test_each_request_ends_once(soak: Soak, record_property: Callable[[str, object], None]) -> None:
    """All requests have checked their end by now, and the server's counters agree."""
    assert soak.worker_restarts == 0
    assert soak.swap_bytes > 0
    for reading in soak.readings:
        assert reading.shared_memory == soak.readings[0].shared_memory
    ends = Counter(
        next((end for end in ("cancelled", "refused") if end in kind), "answered")
        for kind in soak.sent.elements()
    )
    record_property("requests", soak.sent.total())
    record_property("cancelled", ends["cancelled"])
    record_property("refused", ends["refused"])
    record_property("swapped out, MiB", round(soak.swap_bytes / MIB))
    record_property("names in /dev/shm", len(soak.readings[0].shared_memory))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_process_has_stays(
    name: str, soak: Soak, is_long: bool, record_property: Callable[[str, object], None]
) -> None:
    first, *others = holdings = [reading.holdings[name] for reading in soak.readings]
    most_growth = MOST_GROWTH if is_long else MOST_SHORT_GROWTH
    limit = max(first.memory_bytes * (1 + most_growth), first.memory_bytes + GRAIN_BYTES)
    for other in others:
        assert other.pid == first.pid
        assert other.memory_bytes <= limit
    before, *after = holdings if is_long else holdings[-2:]
    for other in after:
        assert other.num_descriptors == before.num_descriptors
        assert other.num_threads == before.num_threads
    growth = others[-1].memory_bytes / first.memory_bytes - 1
    record_property("after warm-up, MiB", f"{first.memory_bytes / MIB:.1f}")
    record_property("at the end, MiB", f"{others[-1].memory_bytes / MIB:.1f}")
    record_property("growth", f"{growth:+.1%}")
    record_property("descriptors", others[-1].num_descriptors)
    record_property("threads", others[-1].num_threads)
