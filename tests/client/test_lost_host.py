"""The server's host vanishes: it answers nothing and closes no connection."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
from fastserve_client import FastServeClient

TIMEOUT_MS = 10_000


def test_what_a_lost_host_does_not_acknowledge_breaks_the_connection() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with FastServeClient(f"grpc://127.0.0.1:{port}") as client:
        client.is_ready()  # connects
        (descriptor,) = [
            connection.fd
            for connection in psutil.Process().net_connections("tcp")
            if connection.raddr and connection.raddr.port == port
        ]
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            got_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    server.stop(None).wait()
    assert got_ms == TIMEOUT_MS
