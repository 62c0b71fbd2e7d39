"""A signal handler may close a stream."""

from __future__ import annotations

import socket

import pytest
from fastserve_client import FastServeClient
from interruptions import interrupts_itself


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_stream_may_be_closed_in_the_middle_of_its_close(scheme: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        FastServeClient(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}") as client,
    ):
        stream = client.stream("Hello")
        assert interrupts_itself(stream.close)
        assert list(stream) == []
