from __future__ import annotations

import pytest
from fastserve_client import Endpoint, InvalidRequest


@pytest.mark.parametrize(
    ("url", "scheme", "target"),
    [
        ("grpc://127.0.0.1:8001", "grpc", "127.0.0.1:8001"),
        ("grpc://triton.example", "grpc", "triton.example:8001"),
        ("grpc://triton.example/", "grpc", "triton.example:8001"),
        ("127.0.0.1:18001", "grpc", "127.0.0.1:18001"),
        ("localhost", "grpc", "localhost:8001"),
        ("grpc://[::1]:9001", "grpc", "[::1]:9001"),
        ("[::1]", "grpc", "[::1]:8001"),
        ("http://127.0.0.1:18000/", "http", "127.0.0.1:18000"),
        ("http://triton.example", "http", "triton.example:8000"),
        ("HTTPS://triton.example", "https", "triton.example:443"),
        ("grpcs://triton.example", "grpcs", "triton.example:443"),
        ("grpcs://triton.example:8443", "grpcs", "triton.example:8443"),
    ],
)
def test_accepts_the_forms_that_users_type(url: str, scheme: str, target: str) -> None:
    endpoint = Endpoint.parse(url)
    assert endpoint.target == target
    assert str(endpoint) == f"{scheme}://{target}"
    assert endpoint.uses_http == scheme.startswith("http")
    assert endpoint.uses_tls == scheme.endswith("s")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://127.0.0.1", "unknown scheme 'ftp'"),
        ("grpc://127.0.0.1:notaport", "port is not a number"),
        ("grpc://127.0.0.1:70000", "port is not a number"),
        ("grpc://127.0.0.1:0", "port 0"),
        ("grpc://:8001", "host is missing"),
        ("", "host is missing"),
        ("grpc://127.0.0.1:8001/v2", "more than a host and a port"),
        ("http://127.0.0.1:8000/v2", "more than a host and a port"),
        ("grpc://[::1", "not a valid URL"),
        ("http://\u2603.example", "ASCII"),
        ("grpc://a\udcff", "ASCII"),
        ("http://host\x00", "ASCII"),
        ("http://127.0.0.256:8000", "numbers of an address are 0 to 255"),
        ("grpc://1.2.3.4444", "numbers of an address are 0 to 255"),
    ],
)
def test_refuses_other_urls_and_shows_the_right_form(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Endpoint.parse(url)
    message = str(caught.value)
    assert reason in message
    assert repr(url) in message
    assert "grpc://127.0.0.1:8001 or http://127.0.0.1:8000" in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("grpc://user:s3cret@127.0.0.1:8001", "grpc://***@127.0.0.1:8001"),
        ("user:s3cret@127.0.0.1:8001", "***@127.0.0.1:8001"),
        ("grpc://127.0.0.1:8001?key=s3cret", "grpc://127.0.0.1:8001?***"),
        ("http://user:s3#cret@127.0.0.1", "http://***@127.0.0.1"),
    ],
)
def test_shows_no_keys_of_a_url(url: str, shown: str) -> None:
    with pytest.raises(InvalidRequest, match=r"more than a host|not a number") as caught:
        Endpoint.parse(url)
    assert f"got {shown!r}; " in str(caught.value)
