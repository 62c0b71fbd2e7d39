"""All that differs between a GPU and the CPU of a dry run: streams, clocks, graphs, memory."""

from __future__ import annotations

import gc
import itertools
import math
import platform
import shutil
import statistics
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]

# The inputs of repeated calls exceed the last cache so many times that none stays in it.
CACHES_EXCEEDED = 3
# Calls in one captured graph: so many that the gap between two replays does not count.
CALLS_IN_A_GRAPH = 32
# A series of replays lasts about this long and has so many replays; its median counts.
SERIES_S = 0.2
FEWEST_REPLAYS, MOST_REPLAYS = 5, 100
# Work of some milliseconds, which keeps the device busy while the host launches a call.
BUSY_CYCLES = 10_000_000


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the mean of the medians of two series, and how far they are apart."""

    seconds: float
    spread: float
    """Difference of the two medians over their mean."""

    @classmethod
    def of(cls, first_s: float, second_s: float) -> Timing:
        mean_s = (first_s + second_s) / 2
        return cls(mean_s, abs(first_s - second_s) / mean_s)


class Device(ABC):
    """Where the checks run."""

    is_dry_run: bool
    torch_device: torch.device
    cache_bytes: int
    """Size of the last cache before memory."""
    memory_bytes: float
    """Of the device."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name, driver and sizes, as JSON types."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work that was launched has ended."""

    @abstractmethod
    def stream(self) -> AbstractContextManager[object]:
        """A new stream, current within the context."""

    @abstractmethod
    def host_memory(self, num_bytes: int) -> Tensor:
        """uint8 ``[num_bytes]`` that the device copies from and to without a detour."""

    @abstractmethod
    def free(self) -> None:
        """Give back unused memory, to other processes too."""

    @abstractmethod
    def free_bytes(self) -> float:
        """Bytes of device memory that can still be allocated. Call ``free`` first to count unused
        memory too."""

    @abstractmethod
    def time(self, calls: Sequence[Call], calls_in_a_graph: int = CALLS_IN_A_GRAPH) -> Timing:
        """Device time of one call; the calls take turns.

        Args:
            calls_in_a_graph: at least so many are captured in one graph.
        """

    @abstractmethod
    def queued_time(self, call: Call, repeats: int) -> Timing:
        """Device time of one call that no graph can hold.

        It is launched while the device is busy, so the device has the whole call when it gets
        there. The call must not wait for the device.
        """

    def wall_time(self, call: Call, repeats: int) -> Timing:
        """Time of one call that waits for its result, host included; two calls warm up."""
        for _ in range(2):
            call()
        return Timing.of(
            *(statistics.median(_seconds(call) for _ in range(repeats)) for _ in range(2))
        )

    def num_inputs(self, bytes_of_one: int) -> int:
        """Number of input sets to take in turn, so that no set is in the cache at its turn."""
        return math.ceil(CACHES_EXCEEDED * self.cache_bytes / bytes_of_one) + 1


class CudaDevice(Device):
    """The current CUDA device."""

    is_dry_run = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.cache_bytes = properties.L2_cache_size
        self.memory_bytes = properties.total_memory

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return {
            "name": properties.name,
            "capability": list(torch.cuda.get_device_capability(self.torch_device)),
            "memory_gib": round(self.memory_bytes / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cache_mib": round(self.cache_bytes / 2**20, 1),
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream(self.torch_device))

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def free_bytes(self) -> float:
        return float(torch.cuda.mem_get_info(self.torch_device)[0])

    def time(self, calls: Sequence[Call], calls_in_a_graph: int = CALLS_IN_A_GRAPH) -> Timing:
        # A whole number of rounds over the inputs.
        rounds = math.ceil(calls_in_a_graph / len(calls))
        graph = self._capture(calls, rounds)
        graph.replay()
        (once_s,) = self._replay(graph, 1)
        count = min(MOST_REPLAYS, max(FEWEST_REPLAYS, round(SERIES_S / once_s)))
        medians = [
            statistics.median(self._replay(graph, count)) / (rounds * len(calls)) for _ in range(2)
        ]
        return Timing.of(*medians)

    def queued_time(self, call: Call, repeats: int) -> Timing:
        for _ in range(2):  # wait for each: a result's memory may be reused once it is freed
            self._queued(call)
        return Timing.of(
            *(statistics.median(self._queued(call) for _ in range(repeats)) for _ in range(2))
        )

    def _queued(self, call: Call) -> float:
        """Device seconds of a call that is launched as a whole before the device begins it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        call()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _capture(self, calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
        """A graph of rounds of all calls.

        Each call runs once before the capture, which must not contain compiling and first
        allocations.
        """
        current = torch.cuda.current_stream(self.torch_device)
        warm_up = torch.cuda.Stream(self.torch_device)
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            make_rounds(calls, 1)
        current.wait_stream(warm_up)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            make_rounds(calls, rounds)
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        """Seconds of each replay. All are launched before the first is waited for, so the device
        never waits for the host between an event and the replay that it times."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        self.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]


class CpuDevice(Device):
    """Runs the same code on the CPU, to see that it works. Its times say nothing of a GPU."""

    is_dry_run = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.cache_bytes = 2**10
        self.memory_bytes = math.inf

    def describe(self) -> dict[str, Any]:
        return {"name": f"dry run on a CPU ({platform.machine()})"}

    def synchronize(self) -> None:
        pass

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self) -> None:
        gc.collect()

    def free_bytes(self) -> float:
        return math.inf

    def time(self, calls: Sequence[Call], calls_in_a_graph: int = CALLS_IN_A_GRAPH) -> Timing:
        return self.wall_time(calls[0], 1)

    def queued_time(self, call: Call, repeats: int) -> Timing:
        return self.wall_time(call, repeats)

    def wall_time(self, call: Call, repeats: int) -> Timing:
        return Timing.of(_seconds(call), _seconds(call))


def find_device(*, tiny: bool) -> Device:
    """The GPU; with ``tiny`` the CPU."""
    return CpuDevice() if tiny else CudaDevice()


def make_rounds(calls: Sequence[Call], rounds: int) -> None:
    """Makes all calls in turn, so many times.

    A round's results stay until the next round has its own. Otherwise a call would get the memory
    of the result before it, and write to the cache alone. At most two rounds' results exist.
    """
    results: list[object] = []
    for _ in range(rounds):
        results = [call() for call in calls]
    results.clear()


def _seconds(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _driver() -> str | None:
    """Version of NVIDIA's driver; None if nvidia-smi does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None
