from __future__ import annotations

import fastserve_client
import pytest
from fresh_interpreter import loaded_modules


def test_the_client_loads_neither_torch_nor_the_server() -> None:
    loaded = loaded_modules(
        "import fastserve_client.grpc_aio_transport, fastserve_client.http_transport, "
        "fastserve_client.aio_client, fastserve_client.terminal"
    )
    assert {"tritonclient", "aiohttp"} <= loaded
    assert not loaded & {"torch", "fastserve_backend", "fastserve_kernels", "pydantic", "fastapi"}


def test_http_needs_no_grpc_and_grpc_no_http() -> None:
    open_and_close = "from fastserve_client import FastServeClient as C; C({!r}).close()"
    over_http = loaded_modules(open_and_close.format("http://127.0.0.1:9"))
    assert "aiohttp" in over_http
    assert not over_http & {"grpc", "tritonclient", "numpy", "google"}
    over_grpc = loaded_modules(open_and_close.format("grpc://127.0.0.1:9"))
    assert "grpc" in over_grpc
    assert "aiohttp" not in over_grpc


@pytest.mark.slow
def test_the_gateway_needs_nothing_of_the_server_either() -> None:
    loaded = loaded_modules("import fastserve_gateway.command")
    assert "fastapi" in loaded
    assert not loaded & {"torch", "fastserve_backend", "fastserve_kernels", "msgspec"}


def test_the_wire_names_load_nothing() -> None:
    loaded = loaded_modules("import fastserve_client.protocol")
    assert not loaded & {"grpc", "tritonclient", "numpy", "google", "torch"}


def test_every_public_name_is_there() -> None:
    for name in fastserve_client.__all__:
        assert getattr(fastserve_client, name) is not None


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'FastServ'"):
        _ = fastserve_client.FastServ  # type: ignore[attr-defined]
