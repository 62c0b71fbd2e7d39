"""Encrypts and authenticates sockets between hosts with a secret that the hosts share.

Both key pairs of ZeroMQ's CURVE are derived from the secret. So whoever knows it has all keys, and
whoever does not has none.
"""

from __future__ import annotations

import hashlib
import hmac
import os

import zmq
from zmq.utils import z85

from fastserve_backend.errors import ConfigError

SECRET_VARIABLE = "FASTSERVE_CLUSTER_SECRET"
# Keys are derived without stretching, so the secret itself must be impossible to guess.
MIN_SECRET_CHARS = 32
# In ms: how often a rank pings the engine's host, and how long it waits for the answer. Together
# they end a rank within 8 s if that host vanishes.
PING_MS = 2000
PONG_TIMEOUT_MS = 6000


class ClusterKeys:
    """The key pairs of the engine and of the ranks."""

    def __init__(self, secret: str) -> None:
        self._engine_secret, self._engine_public = _key_pair(secret, "engine")
        self._rank_secret, self.rank_public = _key_pair(secret, "rank")

    @classmethod
    def from_environment(cls) -> ClusterKeys:
        """Raises ConfigError if the secret is missing or too short."""
        secret = os.environ.get(SECRET_VARIABLE, "")
        if len(secret) < MIN_SECRET_CHARS:
            given = f"has {len(secret)} characters" if secret else "is not set"
            raise ConfigError(
                f"{SECRET_VARIABLE} {given}; several hosts need the same secret of at least "
                f"{MIN_SECRET_CHARS} characters in the environment of each, for example from "
                "`openssl rand -hex 32`"
            )
        return cls(secret)

    def secure_engine(self, socket: zmq.Socket[bytes]) -> None:
        """Call this before the socket is bound. The context's authenticator decides who may
        connect."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._engine_secret)

    def secure_rank(self, socket: zmq.Socket[bytes]) -> None:
        """Call this before the socket is connected."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._engine_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.rank_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._rank_secret)
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PONG_TIMEOUT_MS)


def _key_pair(secret: str, owner: str) -> tuple[bytes, bytes]:
    """Private and public key, each 40 characters in ZeroMQ's text form."""
    label = f"fastserve cluster key of the {owner}".encode()
    private = z85.encode(hmac.new(secret.encode(), label, hashlib.sha256).digest())
    return private, zmq.curve_public(private)
