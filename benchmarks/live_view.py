"""What the live view costs: a picture on the engine's thread, and showing it in a browser.

    python benchmarks/live_view.py

A tiny OPT with random weights and 300 unfinished jobs, of which a picture lists 256. First an
engine in this process: the time of making a picture, and apart from it of its JSON. Then a
tritonserver, a gateway and a headless chromium (Debian's ``chromium`` and ``chromium-driver``),
which gets ten pictures a second for a while: the time that its page spends in scripts, styles and
layout, a picture. All times are CPU times of the thread, so that they do not depend on what else
the machine does.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from fastserve_backend import LLM, SamplingParams, engine
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.picture import take_picture
from fastserve_backend.engine.step_loop import StepLoop
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import FastServeClient
from fastserve_client.engine_state import EngineState
from gateway_overhead import start_gateway
from selenium import webdriver

NUM_JOBS = 300
PROMPT = [7] * 40
MAX_TOKENS = 2000  # far more than come while it is measured
PICTURES = 200
INTERVAL_S = 0.05
BROWSER_S = 20.0
TINY = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "float32",
}
KEYS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 16,
    "device_blocks": 400,
    "swap_space_gib": 0.2,
}


def measure_engine(model: Path) -> None:
    making_s: list[float] = []
    encoding_s: list[float] = []
    sizes: list[int] = []
    done = threading.Event()

    def timed(
        now: float, policy_name: str, loop: StepLoop, counters: EngineCounters
    ) -> EngineState:
        started = time.thread_time()
        state = take_picture(now, policy_name, loop, counters)
        making_s.append(time.thread_time() - started)
        return state

    def sink(state: EngineState | None) -> None:
        if state is None or len(state.jobs) < 256:
            return
        started = time.thread_time()
        sizes.append(len(msgspec.json.encode(state)))
        encoding_s.append(time.thread_time() - started)
        if len(sizes) == PICTURES:
            done.set()

    with patch.object(engine, "take_picture", timed), LLM(str(model), **KEYS) as llm:
        for number in range(NUM_JOBS):
            params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
            llm.engine.submit(str(number), PROMPT, params, lambda output: None)
        llm.engine.watch(INTERVAL_S, sink)
        assert done.wait(120.0)
    print(
        f"engine: a picture of 256 jobs takes {statistics.median(making_s) * 1e3:.2f} ms on its "
        f"thread (median of {len(making_s)}); its JSON has {statistics.median(sizes) / 1e3:.0f} kB "
        f"and takes {statistics.median(encoding_s) * 1e3:.2f} ms on another"
    )


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    with tempfile.TemporaryDirectory() as profile:
        for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
                     "--no-first-run", "--disable-background-networking",
                     "--disable-component-update", "--disable-sync", "--window-size=1440,900",
                     f"--user-data-dir={profile}"):  # fmt: skip
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def measure_browser(model: Path, directory: Path) -> None:
    config = EngineConfig().with_keys(model=str(model), **KEYS)
    with ExitStack() as stack:
        server = stack.enter_context(
            TritonServer(
                config,
                http_port=0,
                grpc_port=0,
                metrics_port=0,
                log_path=directory / "server.log",
            )
        )
        process, url = start_gateway(server.endpoints.grpc_url)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        client = stack.enter_context(FastServeClient(server.endpoints.grpc_url))
        for _ in range(NUM_JOBS):
            job = client.stream(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True)
            stack.callback(job.close)
        driver = stack.enter_context(browser())
        driver.get(f"{url}/live")
        deadline = time.monotonic() + 180.0
        while driver.execute_script("return document.querySelectorAll('.job').length") < 256:
            assert time.monotonic() < deadline, "the page does not show the jobs"
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        before, first = metrics(driver), shown(driver)
        threading.Event().wait(BROWSER_S)
        after, last = metrics(driver), shown(driver)
    pictures = last - first
    names = ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration", "TaskDuration")
    spent = ", ".join(
        f"{name.removesuffix('Duration')} {(after[name] - before[name]) / pictures * 1e3:.2f} ms"
        for name in names
    )
    print(f"browser: {pictures / BROWSER_S:.1f} pictures/s of 256 jobs; a picture: {spent}")


def metrics(driver: webdriver.Chrome) -> dict[str, float]:
    answer = driver.execute_cdp_cmd("Performance.getMetrics", {})
    return {metric["name"]: metric["value"] for metric in answer["metrics"]}


def shown(driver: webdriver.Chrome) -> int:
    """Pictures that the page has shown."""
    return int(driver.execute_script("return document.getElementById('lanes').dataset.pictures"))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "tiny"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        measure_engine(model)
        measure_browser(model, directory)


if __name__ == "__main__":
    main()
