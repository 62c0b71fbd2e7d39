"""Bytes of memory that each process keeps for a request, by the way in which requests come.

    python benchmarks/request_memory.py
    python benchmarks/request_memory.py --requests 100000 --only "HTTP generate"

A real tritonserver with a tiny model, and two gateways, one over gRPC and one over HTTP. For each
way, a quarter of the requests warms up; the rest come in slices, after each of which the memory of
every process is read. The figure is the slope of a straight line through these readings, with its
standard error. An allocator keeps what was freed, so the first tens of thousands of requests can
show a slope that later ones do not: only one that stays with more --requests is a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import aiohttp
import psutil
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import AsyncFastServeClient, InvalidRequest
from fastserve_client.protocol import MODEL_NAME
from rich.console import Console
from rich.table import Table

MODEL = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_attention_heads": 2,
    "ffn_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "float32",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
SLICES = 16
AT_ONCE = 32
SETTLE_S = 1.0
LONG = 200
"""Tokens of a request that is cancelled after its first."""

Send = Callable[[int], Awaitable[None]]


def resident_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process; what it shares counts in parts. Not the pages of
    files: how many of these it has depends on who else runs."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return sum(1024 * int(kib) for kib in re.findall(r"Pss_(?:Anon|Shmem):\s+(\d+) kB", rollup))


@contextmanager
def gateway(url: str) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "fastserve_backend", "gateway", "--port", "0", "--url", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = re.search(r"http://\S+(?=/v1)", process.stderr.readline())
            assert found is not None
            yield found[0], process.pid
            process.terminate()
        finally:
            process.kill()


def processes(server: TritonServer) -> dict[str, int]:
    """Ids of those of the server, by name."""
    found = {}
    for pid in server.runtime.processes():
        words = " ".join(psutil.Process(pid).cmdline())
        if pid == server.pid:
            found["tritonserver"] = pid
        elif pid == server.runtime.stub_pid():
            found["stub"] = pid
        elif "fastserve_backend.worker" in words:
            found["rank"] = pid
    return found


class Ways:
    """One method for each way in; ``number`` makes requests differ."""

    def __init__(
        self,
        server: TritonServer,
        grpc_gateway: str,
        http_gateway: str,
        client: AsyncFastServeClient,
        http: aiohttp.ClientSession,
    ) -> None:
        self._grpc_url = f"grpc://{server.endpoints.grpc_url}"
        self._triton = f"{server.endpoints.http_url}/v2/models/{MODEL_NAME}"
        self._client = client
        self._http = http
        self.all: dict[str, Send] = {
            "gRPC": self.grpc,
            "gRPC, a channel each": self.grpc_channel,
            "gRPC, cancelled": self.grpc_cancelled,
            "gRPC, refused": self.grpc_refused,
            "HTTP generate": self.generate,
            "HTTP generate, refused": self.generate_refused,
            "HTTP generate_stream": self.generate_stream,
            "HTTP generate_stream, cancelled": self.generate_stream_cancelled,
        }
        for kind, url in (("gRPC", grpc_gateway), ("HTTP", http_gateway)):
            name, url = f"gateway over {kind}", f"{url}/v1/completions"
            self.all |= {
                name: partial(self.gateway, url, stream=False),
                f"{name}, stream": partial(self.gateway, url, stream=True),
                f"{name}, cancelled": partial(self.gateway_cancelled, url),
                f"{name}, refused": partial(self.gateway_refused, url),
            }

    async def grpc(self, number: int) -> None:
        await self._client.generate(f"{number}", max_tokens=1)

    async def grpc_channel(self, number: int) -> None:
        async with AsyncFastServeClient(self._grpc_url) as client:
            await client.generate(f"{number}", max_tokens=1)

    async def grpc_cancelled(self, number: int) -> None:
        async with self._client.stream(f"{number}", max_tokens=LONG, ignore_eos=True) as chunks:
            await anext(chunks)

    async def grpc_refused(self, number: int) -> None:
        try:
            await self._client.generate(f"{number}", max_tokens=0)
        except InvalidRequest:
            return
        raise AssertionError("it was taken")

    async def generate(self, number: int) -> None:
        await self._post(f"{self._triton}/generate", {"text_input": f"{number}", "max_tokens": 1})

    async def generate_refused(self, number: int) -> None:
        body = {"text_input": f"{number}", "max_tokens": 0}
        await self._post(f"{self._triton}/generate", body, status=400)

    async def generate_stream(self, number: int) -> None:
        body = {"text_input": f"{number}", "max_tokens": 1, "stream": True}
        await self._post(f"{self._triton}/generate_stream", body)

    async def generate_stream_cancelled(self, number: int) -> None:
        body = {
            "text_input": f"{number}",
            "max_tokens": LONG,
            "stream": True,
            "sampling_parameters": json.dumps({"ignore_eos": True}),
        }
        await self._post(f"{self._triton}/generate_stream", body, cancelled=True)

    async def gateway(self, url: str, number: int, *, stream: bool) -> None:
        body = {"model": MODEL_NAME, "prompt": f"{number}", "max_tokens": 1, "stream": stream}
        await self._post(url, body)

    async def gateway_cancelled(self, url: str, number: int) -> None:
        body = {
            "model": MODEL_NAME,
            "prompt": f"{number}",
            "max_tokens": LONG,
            "ignore_eos": True,
            "stream": True,
        }
        await self._post(url, body, cancelled=True)

    async def gateway_refused(self, url: str, number: int) -> None:
        body = {"model": MODEL_NAME, "prompt": f"{number}", "max_tokens": 100_000}
        await self._post(url, body, status=400)

    async def _post(
        self, url: str, body: object, *, status: int = 200, cancelled: bool = False
    ) -> None:
        async with self._http.post(url, json=body) as response:
            if cancelled:
                await response.content.readany()
                response.close()
            else:
                text = await response.text()
                assert response.status == status, text


async def send_all(send: Send, numbers: Iterator[int], how_many: int) -> None:
    left = iter(range(how_many))

    async def one_after_the_other() -> None:
        for _ in left:
            await send(next(numbers))

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))


async def slopes(
    send: Send, numbers: Iterator[int], requests: int, pids: dict[str, int]
) -> dict[str, tuple[float, float]]:
    """Bytes a request and their standard error, by process."""
    await send_all(send, numbers, requests // 4)
    size = requests * 3 // 4 // SLICES
    readings: dict[str, list[int]] = {name: [] for name in pids}
    for _ in range(SLICES):
        await send_all(send, numbers, size)
        await asyncio.sleep(SETTLE_S)
        for name, pid in pids.items():
            readings[name].append(resident_bytes(pid))
    sent = [size * place for place in range(SLICES)]
    return {name: slope(sent, values) for name, values in readings.items()}


def slope(xs: list[int], ys: list[int]) -> tuple[float, float]:
    """Of the least squares' line, and its standard error."""
    found, intercept = statistics.linear_regression(xs, ys)
    residuals = sum((y - found * x - intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    mean = statistics.fmean(xs)
    spread = sum((x - mean) ** 2 for x in xs)
    return found, (residuals / (len(xs) - 2) / spread) ** 0.5


async def measure(
    server: TritonServer, grpc: tuple[str, int], http: tuple[str, int], requests: int, only: str
) -> None:
    pids = processes(server) | {"gateway, gRPC": grpc[1], "gateway, HTTP": http[1]}
    table = Table("", "requests/s", *pids)
    numbers = count()
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        AsyncFastServeClient(f"grpc://{server.endpoints.grpc_url}") as client,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        for name, send in Ways(server, grpc[0], http[0], client, session).all.items():
            if only not in name:
                continue
            started_s = time.perf_counter()
            found = await slopes(send, numbers, requests, pids)
            seconds = time.perf_counter() - started_s
            cells = [f"{bytes_:.0f} ± {error:.0f}" for bytes_, error in found.values()]
            table.add_row(name, f"{requests / seconds:.0f}", *cells)
            print(name, f"{requests / seconds:.0f}/s", *cells, sep=" | ", flush=True)
    assert processes(server).items() <= pids.items(), "a process was restarted"
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000, help="of each way")
    parser.add_argument("--only", default="", help="ways whose names have this text in them")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        config = EngineConfig().with_keys(
            model=directory,
            load_format="dummy",
            dtype="float32",
            device="cpu",
            policy="skip_join_mlfq",
            max_num_seqs=AT_ONCE,
            max_num_batched_tokens=4096,
            device_blocks=400,
            swap_space_gib=0.1,
        )
        log = Path(directory) / "server.log"
        server = TritonServer(config, http_port=0, grpc_port=0, metrics_port=0, log_path=log)
        with (
            server,
            gateway(f"grpc://{server.endpoints.grpc_url}") as grpc,
            gateway(server.endpoints.http_url) as http,
        ):
            asyncio.run(measure(server, grpc, http, chosen.requests, chosen.only))


if __name__ == "__main__":
    main()
