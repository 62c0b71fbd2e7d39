"""Requests that no client should send, and requests that are almost valid.

Fields come from the schemas themselves, so a new one is fuzzed from its first day. Valid values
come from ``GOOD`` in fuzzed_values.py; without them hardly a request would be accepted. A request
depends on its number alone, so each can be drawn again. (Strategies of hypothesis took 10 ms for
each, these take 0.2 ms; and what a server answers beside other requests cannot be shrunk.)
"""

from __future__ import annotations

from random import Random

from fuzzed_grpc import GrpcCall, draw_grpc_call
from fuzzed_http import HttpRequest, draw_http_request

Request = HttpRequest | GrpcCall


def draw_request(seed: int, number: int) -> Request:
    """Draws request ``number`` of the sequence with this seed."""
    rng = Random(f"{seed} {number}")
    return draw_grpc_call(rng) if rng.random() < 0.25 else draw_http_request(rng)
