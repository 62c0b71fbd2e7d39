"""The CPU emulates a GPU, to test the host's work around a step: machines of CI have no GPU.

Tensors made on ``cuda:0`` report that device. Operations on them run on the CPU at once, and
kernels in Triton's interpreter, or compiled, as `ptx`. Whatever a real GPU would refuse raises an
error: operations on tensors of two devices, kernels on host memory, waits or copies of pageable
memory in a capture. Operations that make the host wait for the device are recorded. A captured
graph repeats its operations on the same memory.

Streams run nothing concurrently, but they know which operations must have ended before the next one
starts (`Stream`). Not emulated: memory that runs out, and time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakSet

import ptx.driver
import pytest
import torch
from fastserve_kernels.gpu import device as kernel_device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton import knobs
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_READ_BY_THE_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
_COPIES = ("_to_copy", "copy_")
_PRODUCTS = ("mm", "addmm", "bmm", "_addmm_activation")
"""Operations whose kernels may start early."""
_Commands = list[tuple[partial[Any], list[Tensor | None]]]
"""A graph's commands, each with its results; None for a result in an argument's memory."""


@contextmanager
def emulated_gpu() -> Iterator[EmulatedGPU]:
    """Emulates a GPU in this thread and in inference mode, as torch's code for gradients needs a
    driver."""
    if not knobs.runtime.interpret and ptx.driver.capability() is None:
        pytest.skip("kernels are compiled, for a real GPU")
    asked = (kernel_device.capability, kernel_device.multiprocessors)
    gpu = EmulatedGPU()
    ptx.driver.earlier_launches.synchronize()
    try:
        with pytest.MonkeyPatch.context() as monkeypatch, torch.inference_mode(), gpu:
            gpu.install(monkeypatch)
            yield gpu
    finally:
        for one in asked:
            one.cache_clear()


class DeviceTensor(Tensor):
    """A tensor on the device; ``on_host`` has its values. It replaces torch's indexing and
    ``copy_``, which need a driver."""

    on_host: Tensor
    gpu: EmulatedGPU
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, on_host: Tensor, gpu: EmulatedGPU) -> DeviceTensor:
        self: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device=gpu.device,
        )
        self.on_host, self.gpu = on_host, gpu
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside the emulated GPU")

    def __getitem__(self, index: Any) -> Tensor:
        self.gpu.check_index(index)
        place = tree_map(_on_host, index)
        return self.gpu.execute(partial(Tensor.__getitem__, self.on_host, place), [self])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, Tensor) and not _is_here(value) and not _tensors(index):
            self[index].copy_(value)
            return
        self.gpu.check_index(index)
        self.gpu.check_devices("setitem", _tensors((self, value)))
        place = tree_map(_on_host, index)
        self.gpu.execute(partial(Tensor.__setitem__, self.on_host, place, _on_host(value)), [self])

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        copied: Tensor = torch.ops.aten.copy_.default(self, source, non_blocking=non_blocking)
        return copied


class Stream:
    """Operations of a stream end in their order. Those of two streams are in order only if one
    stream has waited for the other."""

    _numbers = count()
    issued: ClassVar[Counter[int]] = Counter()
    """By stream, the number of all its operations."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.number = next(Stream._numbers)
        self.ended_before: Counter[int] = Counter()
        """By stream: how many of its operations will have ended when the next one here starts."""

    def add_operation(self) -> dict[int, int]:
        """Returns ``ended_before`` of the operation after this one."""
        self.ended_before |= _thread.ended
        Stream.issued[self.number] += 1
        self.ended_before[self.number] = Stream.issued[self.number]
        return dict(self.ended_before)

    def __enter__(self) -> None:
        _thread.streams.append(self)

    def __exit__(self, *_: object) -> None:
        _thread.streams.pop()

    def wait_stream(self, stream: Stream) -> None:
        self.ended_before |= stream.ended_before

    def wait_event(self, event: _Event) -> None:
        self.ended_before |= event.ended_before

    def synchronize(self) -> None:
        _thread.ended |= self.ended_before


class _Thread(threading.local):
    """What one thread of the host does."""

    def __init__(self) -> None:
        self.streams = [_default_stream]
        """The last is current."""
        self.ended: Counter[int] = Counter()
        """As `Stream.ended_before`: what the thread has waited for."""
        self.replays = False


_default_stream = Stream()
_thread = _Thread()


def current_stream(device: object = None) -> Stream:
    return _thread.streams[-1]


class EmulatedGPU(TorchDispatchMode):
    """The GPU as one thread sees it. All threads share ``pinned`` memory."""

    computes = True
    """False: kernels do nothing, all memory is zero, and so steps take little time."""

    def __init__(
        self,
        device: torch.device = DEVICE,
        pinned: dict[int, Tensor] | None = None,
        registered: dict[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self.waits: list[str] = []
        """What made the host wait until the device had done all that it was given. A wait for an
        event is none."""
        self.num_replays = 0
        """Of all graphs."""
        self.graphs: WeakSet[_Graph] = WeakSet()
        """Those that were captured and still exist."""
        self._capture: _Commands | None = None
        self.captured_in: _Graph | None = None
        """The graph that is captured now."""
        self.pinned = {} if pinned is None else pinned
        """By address, held so that no other memory gets it."""
        self.registered = {} if registered is None else registered
        """Sizes in bytes of pieces of memory, by address."""
        self.most_registered: float = float("inf")
        """In bytes; beyond that, memory is refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        leaves = tree_leaves((args, kwargs))
        tensors = _tensors(leaves)
        is_here = any(map(_is_here, tensors))
        device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        to_gpu = device is not None and device.type == "cuda"
        pins = kwargs.pop("pin_memory", False)
        must_zero = not self.computes and "empty" in name
        if not is_here and not to_gpu:
            result = func(*args, **kwargs)
            if not pins:
                return result
            return self._pin(result.zero_() if must_zero else result)
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite):
            with self:
                return func.decompose(*args, **kwargs)
        if name in _COPIES:
            self._check_copy(name, args, kwargs, to_gpu)
        elif name == "index":
            self.check_index(args[1])
        else:
            self.check_devices(name, tensors)
        if name in _READ_BY_THE_HOST or "unique" in name:
            self.wait(name)
        if to_gpu:
            kwargs["device"] = _CPU
        operation = partial(func, *tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        if name in _PRODUCTS:
            operation = partial(_multiplied, operation)
        if device is not None and not to_gpu:  # a copy to the host, to pinned memory
            return self._pin(operation())
        if must_zero:
            operation = partial(_zeroed, operation)
        results = self.execute(operation, tensors)
        if name in _COPIES and not all(map(_is_here, tensors)):
            ptx.driver.earlier_launches.synchronize()  # what follows waits for a copy of the host's
        elif _has_kernel(func):
            self._note_written(name, results)
        return results

    def _note_written(self, name: str, results: Any) -> None:
        """Kernels that start early must not read what this operation computes."""
        earlier = ptx.driver.earlier_launches
        if name not in _PRODUCTS:  # it starts when everything before has ended
            earlier.synchronize()
        for result in tree_leaves(results):
            if isinstance(result, DeviceTensor):
                storage = result.on_host.untyped_storage()
                earlier.note(storage.data_ptr(), storage.nbytes())

    def execute(self, operation: partial[Any], arguments: list[Tensor]) -> Any:
        """Runs an operation and returns its results on the device. Within a capture it becomes a
        command of the graph."""
        given = {id(tensor.on_host): tensor for tensor in arguments if _is_here(tensor)}
        results = operation()
        if self._capture is not None:
            old = {_address(_on_host(tensor)) for tensor in arguments}
            new = [None if _address(one) in old else one for one in _tensors(results)]
            self._capture.append((operation, new))

        def on_device(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            return given[id(result)] if id(result) in given else DeviceTensor(result, self)

        return tree_map(on_device, results)

    @property
    def mode(self) -> str:
        """How an operation runs now."""
        if self._capture is not None:
            return "captured"
        return "replayed" if _thread.replays else "eager"

    def wait(self, reason: str) -> None:
        if self._capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")
        self.waits.append(reason)
        ptx.driver.earlier_launches.synchronize()

    def check_index(self, index: Any) -> None:
        for part in tree_leaves(index):
            if isinstance(part, Tensor) and not _is_here(part):
                self.wait("an index of the host's")
            elif isinstance(part, Tensor) and part.dtype == torch.bool:
                self.wait("an index that is a mask")

    def check_devices(self, name: str, tensors: list[Tensor]) -> None:
        if any(not _is_here(tensor) and tensor.dim() > 0 for tensor in tensors):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")

    def _check_copy(self, name: str, args: Any, kwargs: Any, to_gpu: bool) -> None:
        """Checks that a copy to the host by ``to`` either waits or goes to pinned memory."""
        source = args[0] if name == "_to_copy" else args[1]
        if name == "_to_copy" and not to_gpu and kwargs.get("device") is None:
            return  # of another type
        is_async = kwargs.get("non_blocking", name == "copy_" and args[2:] == (True,))
        on_host = source if not _is_here(source) else args[0]
        if _is_here(on_host):
            if name == "_to_copy" and not to_gpu and not is_async:
                self.wait("a copy to the host")
            return
        if not is_async or not self._is_pinned(on_host):
            self.wait(f"a copy of {'pageable memory' if is_async else 'the host'}")

    def _is_pinned(self, tensor: Tensor) -> bool:
        """Whether a copy need not wait: the memory is pinned, and by one registration."""
        if _address(tensor) in self.pinned:
            return True
        start = tensor.data_ptr()
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        end = start + (last + 1) * tensor.element_size()
        pieces = self.registered.items()
        inside = [piece <= start and end <= piece + size for piece, size in pieces]
        if not any(inside) and any(start < piece + size and piece < end for piece, size in pieces):
            raise ValueError("a copy crosses the end of registered memory")
        return any(inside)

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        end = address + num_bytes
        if sum(self.registered.values()) + num_bytes > self.most_registered:
            return 2  # cudaErrorMemoryAllocation
        if any(address < a + size and a < end for a, size in self.registered.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered[address] = num_bytes
        return 0

    def _unregister(self, address: int) -> int:
        # 713: cudaErrorHostMemoryNotRegistered
        return 0 if self.registered.pop(address, None) else 713

    def _pin(self, tensor: Tensor) -> Tensor:
        self.pinned[_address(tensor)] = tensor
        return tensor

    @contextmanager
    def capture(self, graph: _Graph, stream: Stream | None) -> Iterator[None]:
        _thread.ended |= Stream.issued  # a real capture waits for the device first
        self._capture = commands = []
        self.captured_in = graph
        ptx.driver.earlier_launches.synchronize()  # as `torch.cuda.graph` does
        try:
            with stream or Stream():
                yield
        finally:
            self._capture = self.captured_in = None
        graph.commands = commands
        self.graphs.add(graph)
        # A real capture computes nothing.
        for _, results in commands:
            for result in results:
                if result is not None and result.is_floating_point():
                    result.fill_(float("nan"))

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        if not self.computes:
            return
        tensors = _tensors((args, kwargs))
        if any(not _is_here(one) and not self._is_pinned(one) for one in tensors):
            raise ValueError("a kernel cannot access the host's memory, unless it is pinned")
        run = _compiled if isinstance(kernel, JITFunction) else _interpreted
        self.execute(
            partial(run, kernel, *map(_on_host, args), **tree_map(_on_host, kwargs)), tensors
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces functions of torch.cuda and Triton's launches."""

        def capture(graph: _Graph, stream: Stream | None = None, **_: Any) -> Any:
            return self.capture(graph, stream)

        def synchronize(device: object = None) -> None:
            self.wait("synchronize")
            _thread.ended |= Stream.issued

        def check_error(error: int) -> None:
            if error:
                raise _cuda_error(error)

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.launch(kernel, *args, **kwargs)

        capability = ptx.driver.capability() or (9, 0)
        properties = SimpleNamespace(multi_processor_count=2, name="emulated")
        for name, value in {
            "_lazy_init": lambda: None,
            "set_device": lambda device: None,
            "get_device_capability": lambda device=None: capability,
            "get_device_properties": lambda device=None: properties,
            "synchronize": synchronize,
            "Event": _Event,
            "Stream": Stream,
            "current_stream": current_stream,
            "stream": lambda stream: stream,
            "CUDAGraph": lambda: _Graph(self),
            "graph": capture,
            "graph_pool_handle": lambda: None,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=self._unregister
            ),
            "check_error": check_error,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: self._pin(tensor.clone()))
        monkeypatch.setattr(GridExecutor, "__call__", launch)
        monkeypatch.setattr(JITFunction, "run", launch)


class _Graph:
    def __init__(self, gpu: EmulatedGPU) -> None:
        self.commands: _Commands = []
        self._gpu = gpu

    def launches(self) -> list[str]:
        """Names of its kernels, and of torch's operations that have one."""
        names = []
        for operation, _ in self.commands:
            function = operation.func
            if function is _multiplied:
                function = operation.args[0].func
            if function in (_compiled, _interpreted):
                names.append(operation.args[0].fn.__name__)
            elif isinstance(function, torch._ops.OpOverload) and _has_kernel(function):
                names.append(function._schema.name.removeprefix("aten::"))
        return names

    def replay(self) -> None:
        assert self.commands, "neither captured nor reset"
        self._gpu.num_replays += 1
        _thread.replays = True
        for operation, results in self.commands:
            for old, new in zip(results, _tensors(operation()), strict=True):
                if old is not None:
                    old.copy_(new)
        _thread.replays = False

    def reset(self) -> None:
        self.commands = []


class _Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._is_timed = enable_timing
        self.ended_before: Counter[int] = Counter()

    def record(self, stream: Stream | None = None) -> None:
        self.ended_before = Counter((stream or current_stream()).ended_before)

    def synchronize(self) -> None:
        _thread.ended |= self.ended_before

    def elapsed_time(self, end: _Event) -> float:
        assert self._is_timed
        assert end._is_timed
        return 1.0


_interpreted, _compiled = GridExecutor.__call__, JITFunction.run


def _cuda_error(code: int) -> torch.cuda.CudaError:
    error = torch.cuda.CudaError.__new__(torch.cuda.CudaError, code)  # its constructor needs CUDA
    RuntimeError.__init__(error, f"emulated ({code})")
    return error


def _zeroed(operation: partial[Tensor]) -> Tensor:
    return operation().zero_()


def _has_kernel(function: Any) -> bool:
    """Whether an operation of torch computes, and not only makes a view or memory."""
    return not function.is_view and "empty" not in function._schema.name


def _multiplied(product: partial[Tensor]) -> Tensor:
    return product.func(*map(_without_gaps, product.args), **product.keywords)


def _without_gaps(factor: Any) -> Any:
    """A copy, if rows have a gap between them. On a CPU with AMX, torch's product of bfloat16 reads
    into the gap and multiplies by 0, which is NaN for NaN."""
    if not isinstance(factor, Tensor):
        return factor
    steps = zip(factor.shape, factor.stride(), strict=True)
    reach = 1 + sum((size - 1) * step for size, step in steps)
    return factor.contiguous() if reach > factor.numel() > 0 else factor


def _on_host(value: Any) -> Any:
    return value.on_host if isinstance(value, DeviceTensor) else value


def _is_here(tensor: Tensor) -> bool:
    return isinstance(tensor, DeviceTensor)


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
