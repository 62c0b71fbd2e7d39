from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import ClientClosed
from fastserve_client.http_transport import HttpTransport
from fastserve_client.request import InferRequest

DEADLINE_S = 10.0


def test_closing_leaves_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        silent.settimeout(DEADLINE_S)
        transport = HttpTransport(Endpoint.parse(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        asking = pool.submit(transport.is_ready, "fastserve", 60.0)
        connection, _ = silent.accept()
        with connection:
            transport.close()
            assert asking.result(DEADLINE_S) is False
    with pytest.raises(ClientClosed):
        transport.start(InferRequest("fastserve", {}), None)
    assert not transport.is_ready("fastserve", 1.0)
