"""A call that is cancelled while it waits for a response leaks no memory, and logs nothing."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from fastserve_client.endpoint import Endpoint
from fastserve_client.grpc_aio_transport import AioGrpcCall, AioGrpcTransport
from fastserve_client.request import InferRequest

AT_ONCE = 16
NUM_CALLS = 1600
ATTEMPTS = 4
# grpcio's array of one operation leaks where the reading task itself is cancelled.
LEAK_BYTES = 80


class MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """Bytes allocated by C and not freed. Python's own small objects are elsewhere."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


SERVER = """
import asyncio
import grpc

async def one_response(request, context):
    yield b""
    await asyncio.Event().wait()

async def serve():
    server = grpc.aio.server()
    handlers = {"ModelStreamInfer": grpc.unary_stream_rpc_method_handler(one_response)}
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(serve())
"""


async def cancel_calls(transport: AioGrpcTransport, how_many: int) -> None:
    left = iter(range(how_many))

    async def cancel_one_after_the_other() -> None:
        for _ in left:
            call = transport.start(InferRequest("model", {}), None)
            await anext(call)
            reader = asyncio.ensure_future(anext(call))
            await asyncio.sleep(0.002)
            reader.cancel()
            await asyncio.wait((reader,))

    await asyncio.gather(*(cancel_one_after_the_other() for _ in range(AT_ONCE)))
    await asyncio.sleep(0.2)


async def test_an_error_after_a_cancelled_read_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection breaks in the moment in which the caller goes away."""
    broken: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    call = AioGrpcCall(Broken(broken), "", asyncio.Event(), set())
    reader = asyncio.ensure_future(anext(call))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait((reader,))
    broken.set_exception(ConnectionResetError())
    await asyncio.sleep(0.01)
    del reader  # its traceback refers to the task that read
    gc.collect()
    assert caplog.messages == []


class Broken:
    """A call of gRPC whose only response is an error, in spite of its cancellation."""

    def __init__(self, response: asyncio.Future[object]) -> None:
        self._response = response

    def cancel(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[object]:
        yield await self._response


@pytest.mark.slow
async def test_cancelled_reads_are_freed() -> None:
    # In a process of its own: grpcio's servers leak too.
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            transport = AioGrpcTransport(Endpoint.parse(f"grpc://127.0.0.1:{port}"))
            await cancel_calls(transport, NUM_CALLS)
            # Other threads of this process allocate, too, but not each time.
            grown = []
            while not grown or (grown[-1] >= NUM_CALLS * LEAK_BYTES / 2 and len(grown) < ATTEMPTS):
                before = allocated_bytes()
                await cancel_calls(transport, NUM_CALLS)
                grown.append(allocated_bytes() - before)
            assert grown[-1] < NUM_CALLS * LEAK_BYTES / 2
            await transport.close()
        finally:
            server.kill()
