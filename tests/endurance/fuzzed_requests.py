"""Requests that no client should send, and such as come close to good ones.

Fields come from the schemas themselves, so a new one is fuzzed from its first day. Values of the
right kind are those of ``GOOD`` in fuzzed_values.py, without which hardly a request would be taken.
A request is drawn from its number alone, so each can be drawn again. (Strategies of hypothesis took
10 ms for each, these take 0.2 ms; and what a server answers beside other requests cannot be
shrunk.)
"""

from __future__ import annotations

from random import Random

from fuzzed_grpc import GrpcCall, draw_grpc_call
from fuzzed_http import HttpRequest, draw_http_request

Request = HttpRequest | GrpcCall


def draw_request(seed: int, number: int) -> Request:
    """Request ``number`` of those that belong to ``seed``."""
    rng = Random(f"{seed} {number}")
    return draw_grpc_call(rng) if rng.random() < 0.25 else draw_http_request(rng)
