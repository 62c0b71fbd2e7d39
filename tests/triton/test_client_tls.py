"""``grpcs://`` and ``https://`` through a relay that speaks TLS like a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import AsyncFastServeClient, ConnectionFailed, Endpoint, FastServeClient
from relay import CERTIFICATE, Relay
from waiting import DEADLINE_S


@pytest.fixture(params=["127.0.0.1", "localhost"])
def tls_url(request: pytest.FixtureRequest, url: str) -> Iterator[str]:
    plain = Endpoint.parse(url)
    relay = Relay(plain.target, tls=True)
    yield f"{plain.scheme}s://{request.param}:{relay.port}"
    relay.close()


async def test_a_certificate_that_the_system_trusts(
    tls_url: str, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with FastServeClient(endpoints.grpc_url) as plain, FastServeClient(tls_url) as client:
        assert client.is_ready(DEADLINE_S)
        completion = client.generate("Hello", **options)
        assert completion == plain.generate("Hello", **options)
    async with AsyncFastServeClient(tls_url) as client:
        assert await client.generate("Hello", **options) == completion


async def test_a_certificate_that_nobody_trusts(tls_url: str) -> None:
    with FastServeClient(tls_url) as client:
        assert not client.is_ready()
        with pytest.raises(ConnectionFailed, match=r"self.signed certificate"):
            client.generate("Hello")
    async with AsyncFastServeClient(tls_url) as client:
        with pytest.raises(ConnectionFailed, match=r"self.signed certificate"):
            await client.generate("Hello")
