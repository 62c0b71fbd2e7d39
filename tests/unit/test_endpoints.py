"""Ports that a server claims before it listens."""

from __future__ import annotations

import socket

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.errors import LaunchError
from fastserve_client.listening import listen, reserve

HOST = "127.0.0.1"
ANY = Endpoints(HOST, 0, 0, 0)


def ports_of(endpoints: Endpoints) -> set[int]:
    return {endpoints.http_port, endpoints.grpc_port, endpoints.metrics_port}


def test_each_claim_gets_ports_of_its_own() -> None:
    with ANY.claim() as first, ANY.claim() as second:
        assert len(ports_of(first) | ports_of(second)) == 6


def test_claimed_ports_stay_reserved_before_and_after_a_server_listens() -> None:
    with ANY.claim() as claimed:
        for port in ports_of(claimed):
            for _ in range(2):
                # The system gives a free port as this bind gets one: only if nobody is bound.
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind((HOST, port))
                with listen(HOST, port):
                    pass


def test_a_restarted_server_claims_its_own_ports_again() -> None:
    with ANY.claim() as claimed, claimed.claim() as again:
        assert again == claimed


def test_two_interfaces_cannot_have_the_same_port() -> None:
    with reserve(HOST, 0) as reserved:
        port = reserved.getsockname()[1]
        with (
            pytest.raises(LaunchError, match="must differ"),
            Endpoints(HOST, port, port, 0).claim(),
        ):
            pass
