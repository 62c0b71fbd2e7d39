from __future__ import annotations

import pytest
from fastserve_client import Endpoint, InvalidRequest


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("grpc://127.0.0.1:8001", "127.0.0.1:8001"),
        ("grpc://triton.example", "triton.example:8001"),
        ("grpc://triton.example/", "triton.example:8001"),
        ("127.0.0.1:18001", "127.0.0.1:18001"),
        ("localhost", "localhost:8001"),
        ("grpc://[::1]:9001", "[::1]:9001"),
        ("[::1]", "[::1]:8001"),
    ],
)
def test_accepts_the_forms_that_users_type(url: str, target: str) -> None:
    endpoint = Endpoint.parse(url)
    assert endpoint.target == target
    assert str(endpoint) == f"grpc://{target}"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:8000", "speaks gRPC"),
        ("https://127.0.0.1", "speaks gRPC"),
        ("ftp://127.0.0.1", "unknown scheme 'ftp'"),
        ("grpc://127.0.0.1:notaport", "port is not a number"),
        ("grpc://127.0.0.1:70000", "port is not a number"),
        ("grpc://127.0.0.1:0", "port 0"),
        ("grpc://:8001", "host is missing"),
        ("", "host is missing"),
        ("grpc://127.0.0.1:8001/v2", "more than a host and a port"),
        ("grpc://user@127.0.0.1:8001", "more than a host and a port"),
        ("grpc://127.0.0.1:8001?x=1", "more than a host and a port"),
        ("grpc://[::1", "not a valid URL"),
    ],
)
def test_refuses_other_urls_and_shows_the_right_form(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Endpoint.parse(url)
    message = str(caught.value)
    assert reason in message
    assert repr(url) in message
    assert "grpc://127.0.0.1:8001" in message
