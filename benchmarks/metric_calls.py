"""What a call to a metric of Triton costs the model's process, and the engine's thread meanwhile.

    python benchmarks/metric_calls.py

A real tritonserver serves OPT-125M with dummy weights by default. Its model is the project's own
with a probe beside it: each round makes the same number of calls of each kind and notes how late
another thread, which stands for the engine's, wakes meanwhile. First without streams, then with as
many as were asked for. docs/metrics.md derives from this how histograms are published.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fastserve_backend.config import EngineConfig
from fastserve_backend.serving import repository
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import AsyncFastServeClient

NUM_CALLS = 200
PROBE = f"""
import json, statistics, threading, time
import triton_python_backend_utils as pb_utils
from fastserve_backend.serving.model import TritonPythonModel as Model

NUM_CALLS = {NUM_CALLS}
PAUSE_S = 50e-6  # as in serving/metrics.py
TICK_S = 0.002


class TritonPythonModel(Model):
    def initialize(self, args):
        super().initialize(args)
        kinds = pb_utils.MetricFamily
        self.families = [
            kinds(name="probe_histogram", description="probe", kind=kinds.HISTOGRAM),
            kinds(name="probe_total", description="probe", kind=kinds.COUNTER),
        ]
        histogram = self.families[0].Metric(labels=dict(), buckets=[0.1 * n for n in range(1, 15)])
        counter = self.families[1].Metric(labels=dict())
        self.calls = dict(
            observe=lambda: histogram.observe(0.4), increment=lambda: counter.increment(1)
        )
        self.num_running = lambda: self._engine.snapshot().running
        self.closed = threading.Event()
        self.probe = threading.Thread(target=self.run, daemon=True)
        self.probe.start()

    def finalize(self):
        self.closed.set()
        self.probe.join()
        super().finalize()

    def run(self):
        pause = threading.Event()
        while not self.closed.wait(0.2):
            for name, call in dict(self.calls, none=None).items():
                for paused in (False, True):
                    if call is None and not paused:
                        continue
                    late, ended = [], threading.Event()
                    watch = threading.Thread(target=self.watch, args=(late, ended))
                    watch.start()
                    times = []
                    for _ in range(NUM_CALLS):
                        began = time.perf_counter()
                        if call is not None:
                            call()
                        times.append((time.perf_counter() - began) * 1e6)
                        if paused:
                            pause.wait(PAUSE_S)
                    ended.set()
                    watch.join()
                    row = dict(
                        running=self.num_running(), call=name, paused=paused,
                        mean_us=statistics.mean(times), median_us=statistics.median(times),
                        late_us=late,
                    )
                    with open(REPORT, "a", encoding="utf-8") as report:
                        print(json.dumps(row), file=report)

    def watch(self, late, ended):
        while True:
            due = time.perf_counter() + TICK_S
            last = ended.wait(TICK_S)
            if last:
                return
            late.append((time.perf_counter() - due) * 1e6)
"""


async def load(url: str, num_streams: int, tokens: int) -> float:
    """Tokens/s of ``num_streams`` streams of so many tokens each."""
    loop = asyncio.get_running_loop()
    async with AsyncFastServeClient(url) as client:

        async def stream(number: int) -> None:
            async for _ in client.stream(
                [4 + number] * 32, max_tokens=tokens, temperature=0, ignore_eos=True
            ):
                pass

        began = loop.time()
        await asyncio.gather(*(stream(number) for number in range(num_streams)))
        return num_streams * tokens / (loop.time() - began)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}, {len(rows)} rounds of {NUM_CALLS} calls")
    for call, paused in dict.fromkeys((row["call"], row["paused"]) for row in rows):
        of_kind = [row for row in rows if (row["call"], row["paused"]) == (call, paused)]
        late = [one for row in of_kind for one in row["late_us"]]
        lateness = f"another thread late: {statistics.median(late):.0f} µs"
        lateness += f", a tenth above {percentile(late, 0.9):.0f}"
        if call == "none":
            print(f"  no calls: {lateness}")
            continue
        means = [row["mean_us"] for row in of_kind]
        print(
            f"  {call}, {'with' if paused else 'no'} pauses: a call takes "
            f"{statistics.mean(means):.0f} µs ({min(means):.0f} to {max(means):.0f}), {lateness}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    arguments = parser.parse_args()
    config = EngineConfig().with_keys(
        model=arguments.model, load_format="dummy", max_num_seqs=arguments.streams
    )
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "rounds.jsonl")
        template = Path(directory, "template")
        shutil.copytree(repository.find_model_template(), template)
        shim = template / "1" / "model.py"
        shim.write_text(
            shim.read_text(encoding="utf-8") + f"\nREPORT = {str(report)!r}\n" + PROBE,
            encoding="utf-8",
        )
        repository.find_model_template = lambda: template
        server = TritonServer(
            config, http_port=0, grpc_port=0, metrics_port=0, log_path=Path(directory, "log")
        )
        with server:
            url = f"grpc://{server.endpoints.grpc_url}"
            asyncio.run(asyncio.sleep(5.0))
            rate = asyncio.run(load(url, arguments.streams, arguments.tokens))
        rows = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    show("idle", [row for row in rows if row["running"] == 0])
    busy = [row for row in rows if row["running"] == arguments.streams]
    show(f"{arguments.streams} streams, {rate:.0f} tokens/s", busy)


if __name__ == "__main__":
    main()
