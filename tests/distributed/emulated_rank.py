"""A whole rank, with all threads, on an emulated GPU. Gloo takes NCCL's place.

With the variable `COMMUNICATIONS` it computes nothing and notes what it exchanges with other ranks.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import ptx.driver

if __name__ == "__main__":
    ptx.driver.install(os.environ[ptx.driver.VARIABLE])  # before the kernels are imported

import pytest
import torch
import torch._dynamo  # which a dispatch mode needs: a process imports it before it forks
import torch.distributed as dist
from communications import Communication
from emulated_gpu import DeviceTensor, EmulatedGPU, Stream, current_stream
from fastserve_backend.worker.__main__ import main
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton import knobs
from triton.runtime.jit import JITFunction

MEMORY = 1 << 30
"""The GPU's memory in bytes. It always counts as free."""
COMMUNICATIONS = "COMMUNICATIONS"
"""Environment variable with the directory for the notes of all ranks."""


def run() -> int:
    """Runs the rank on this thread and on those that it starts."""
    gpu = EmulatedGPU(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    EmulatedGPU.computes = COMMUNICATIONS not in os.environ
    monkeypatch = pytest.MonkeyPatch()
    gpu.install(monkeypatch)
    for name, value in {
        "is_available": True,
        "device_count": int(os.environ["LOCAL_WORLD_SIZE"]),
        "get_device_name": "emulated",
        "mem_get_info": (MEMORY, MEMORY),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    nccl = EmulatedNCCL(gpu)
    for name, replacement in {
        "init_process_group": nccl.init_process_group,
        "new_group": nccl.new_group,
        "destroy_process_group": nccl.destroy_process_group,
        "isend": nccl.isend,
        "recv": nccl.recv,
        **{name: partial(nccl.collective, name) for name in ("all_reduce", "broadcast", "gather")},
    }.items():
        monkeypatch.setattr(dist, name, replacement)
    monkeypatch.setattr(JITFunction, "_do_compile", _in_turn(JITFunction._do_compile))
    run_thread = threading.Thread.run

    def run_on_gpu(thread: threading.Thread) -> None:
        with torch.inference_mode(), EmulatedGPU(gpu.device, gpu.pinned, gpu.registered):
            run_thread(thread)

    monkeypatch.setattr(threading.Thread, "run", run_on_gpu)
    with torch.inference_mode(), gpu:
        return main()


def _in_turn(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks launch the same kernels at the same time. One of them compiles a kernel, and the others
    find it in Triton's cache."""

    def run_alone(*args: Any, **kwargs: Any) -> Any:
        cache = Path(knobs.cache.dir)
        cache.mkdir(parents=True, exist_ok=True)
        with Path(cache, "compiling").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_kernel(*args, **kwargs)

    return run_alone


class EmulatedNCCL:
    """torch's backend for NCCL, with its streams and its communicators.

    As in torch 2.8 to 2.13, a collective runs on the current stream and uses its group's
    communicator. Two ranks that send and receive have a communicator and a stream of their own.
    Both are made by the first operation that needs them.
    """

    def __init__(self, gpu: EmulatedGPU) -> None:
        self._gpu = gpu
        self._real: dict[str, Callable[..., Any]] = {
            name: getattr(dist, name)
            for name in (
                "init_process_group", "new_group", "destroy_process_group", "isend", "recv",
                "all_reduce", "broadcast", "gather",
            )
        }  # fmt: skip
        self._rank = int(os.environ["RANK"])
        self._world = range(int(os.environ["WORLD_SIZE"]))
        self._streams: dict[int, Stream] = {}  # by peer
        self._graphs: list[Any] = []  # with communications
        # What NCCL was given is sent, even if the caller drops it. Gloo would forget it.
        self._sent: list[tuple[_Work, torch.Tensor]] = []
        directory = os.environ.get(COMMUNICATIONS)
        self._notes: IO[str] | None = None
        if directory is not None:
            # Open as long as the process lives.
            self._notes = Path(directory, str(self._rank)).open("w")  # noqa: SIM115

    def init_process_group(self, backend: str, **kwargs: Any) -> None:
        assert backend == "nccl"
        self._real["init_process_group"]("gloo", **kwargs)
        self._note("init_process_group", self._world, current_stream())

    def new_group(self, ranks: list[int], **kwargs: Any) -> Any:
        self._note(f"new_group {ranks}", self._world, current_stream())
        return self._real["new_group"](ranks, **kwargs)

    def destroy_process_group(self) -> None:
        if any(graph.commands for graph in self._graphs):
            raise RuntimeError("NCCL waits for ever for graphs that hold its operations")
        self._note("destroy_process_group", self._world, current_stream())
        self._real["destroy_process_group"]()

    def collective(self, name: str, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        members = dist.get_process_group_ranks(kwargs["group"])

        def operation() -> None:
            self._note(name, members, current_stream(), x, kwargs.get("group_src", 0))
            self._real[name](*_on_host((x, *args)), **_on_host(kwargs))

        self._execute(operation, x, *args)

    def isend(self, x: torch.Tensor, peer: int) -> _Work:
        work: list[Any] = []

        def operation() -> None:
            stream = self._between(peer, self._rank, x)
            sent = _on_host(x)
            work[:] = [_Work(self._real["isend"](sent, peer), stream)]
            self._sent.append((work[0], sent))

        self._execute(operation, x)
        return work[0]

    def recv(self, x: torch.Tensor, peer: int) -> None:
        def operation() -> None:
            stream = self._between(peer, peer, x)
            self._real["recv"](_on_host(x), peer)
            current_stream().wait_stream(stream)

        self._execute(operation, x)

    def _between(self, peer: int, source: int, x: torch.Tensor) -> Stream:
        """Notes an operation of two ranks; returns its stream."""
        stream = self._streams.setdefault(peer, Stream())
        stream.wait_stream(current_stream())
        name = "send" if source == self._rank else "recv"
        self._note(name, sorted((self._rank, peer)), stream, x, source)
        return stream

    def _execute(self, operation: Callable[[], None], *arguments: Any) -> None:
        """Runs a communication. Within a capture it becomes a part of the graph."""
        if self._gpu.captured_in is not None:
            self._graphs.append(self._gpu.captured_in)

        def outside_of_modes() -> None:
            with _disable_current_modes():
                operation()

        tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
        self._gpu.execute(outside_of_modes, tensors)

    def _note(
        self,
        name: str,
        members: Any,
        stream: Stream,
        x: torch.Tensor | None = None,
        source: int = 0,
    ) -> None:
        ended = stream.add_operation()
        if self._notes is None:
            return
        one = Communication(
            name=name,
            members=tuple(members),
            source=source,
            shape=() if x is None else tuple(x.shape),
            dtype="" if x is None else str(x.dtype),
            mode=self._gpu.mode,
            thread=threading.current_thread().name,
            stream=stream.number,
            ended=ended,
        )
        self._notes.write(one.to_json() + "\n")
        self._notes.flush()


class _Work:
    """A send that is under way."""

    def __init__(self, work: Any, stream: Stream) -> None:
        self._work = work
        self._ended = Stream()
        self._ended.wait_stream(stream)

    def wait(self) -> None:
        self._work.wait()
        current_stream().wait_stream(self._ended)


def _on_host(values: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda tensor: tensor.on_host, values)


if __name__ == "__main__":
    sys.exit(run())
