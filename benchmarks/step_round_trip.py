"""What a step costs beside computing: the way from the engine to the ranks and back.

    python -m benchmarks.step_round_trip                # 1 rank, then 4 as TP 4 and as TP 2 × PP 2
    python -m benchmarks.step_round_trip --steps 2000

A decode step of 32 jobs of a tiny model is sent to real ranks, one at a time. The figure is its
time at the engine, from before it is encoded until its result is decoded, less the ranks' computing
time. Computing includes the time that the ranks of a stage wait for each other. With two stages,
the figure includes sending the activations.

"bare" is the time of a message of the same size over ZeroMQ to a process that sends it back, right
before and after. No figure can be below it. On a virtual machine it varies by a factor of five.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq
from fastserve_backend.config import EngineConfig
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.rank_protocol.messages import Setup, Step, StepResult, encoder
from rich.console import Console
from rich.table import Table

JOBS = 32
CONTEXT = 100  # tokens of each job in the cache
BLOCK_SIZE = 16
WARM_UP_STEPS = 100
GOAL_MS = 0.3
DIVISIONS = ((1, 1), (4, 1), (2, 2))
TINY_OPT = {
    "model_type": "opt",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


def decode_step(step_id: int) -> Step:
    blocks = -(-(CONTEXT + 1) // BLOCK_SIZE)
    return Step.of(
        step_id,
        [(CONTEXT, [4 + job], range(job * blocks, (job + 1) * blocks)) for job in range(JOBS)],
    )


def one_step(executor: DistributedExecutor, step_id: int) -> tuple[float, float]:
    """Seconds at the engine, and seconds of computing."""
    step = decode_step(step_id)
    started_s = time.perf_counter()
    executor.submit(step)
    while not isinstance(result := executor.collect(), StepResult):
        pass
    return time.perf_counter() - started_s, result.compute_s


ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.IDENTITY, b"rank-0")
socket.connect(sys.argv[1])
socket.send(b"here")
while (message := socket.recv()):
    socket.send(message)
"""


def bare_round_trips(num_messages: int) -> list[float]:
    """Seconds of each message to a process that only sends it back."""
    data = encoder.encode(decode_step(0))
    context = zmq.Context()
    with tempfile.TemporaryDirectory() as directory, context.socket(zmq.ROUTER) as router:
        address = f"ipc://{directory}/echo.sock"
        router.bind(address)
        echo = subprocess.Popen([sys.executable, "-c", ECHO, address])
        identity, _ = router.recv_multipart()
        times = []
        for _ in range(WARM_UP_STEPS + num_messages):
            started_s = time.perf_counter()
            router.send_multipart([identity, data])
            router.recv_multipart()
            times.append(time.perf_counter() - started_s)
        router.send_multipart([identity, b""])
        echo.wait()
    context.term()
    return times[WARM_UP_STEPS:]


def measure(model: Path, tensor_size: int, num_stages: int, num_steps: int) -> list[float]:
    """Seconds of each step beside its computing."""
    config = EngineConfig().with_keys(
        model=str(model),
        load_format="dummy",
        device="cpu",
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=num_stages,
        device_blocks=JOBS * -(-(CONTEXT + 1) // BLOCK_SIZE),
        swap_space_gib=0,
    )
    executor = DistributedExecutor()
    try:
        executor.start(Setup.of(config), 120.0)
        times = [one_step(executor, step_id) for step_id in range(WARM_UP_STEPS + num_steps)]
    finally:
        executor.close()
    return [elapsed_s - compute_s for elapsed_s, compute_s in times[WARM_UP_STEPS:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    table = Table("ranks", "median ms", "10th percentile", "90th", "bare", f"goal {GOAL_MS} ms")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(TINY_OPT), encoding="utf-8")
        for tensor_size, num_stages in DIVISIONS:
            bare = bare_round_trips(arguments.steps // 2)
            rest = measure(Path(directory), tensor_size, num_stages, arguments.steps)
            bare += bare_round_trips(arguments.steps // 2)
            deciles = statistics.quantiles(rest, n=10)
            table.add_row(
                f"{tensor_size * num_stages} (TP {tensor_size} × PP {num_stages})",
                f"{statistics.median(rest) * 1e3:.3f}",
                f"{deciles[0] * 1e3:.3f}",
                f"{deciles[-1] * 1e3:.3f}",
                f"{statistics.median(bare) * 1e3:.3f}",
                "met" if statistics.median(rest) * 1e3 <= GOAL_MS else "missed",
            )
    console = Console(width=100)
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
