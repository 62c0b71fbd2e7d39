"""Ends this process when the engine is gone, whatever the process waits for."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

# On several hosts: how long a rank looks for an engine, and how long the exchange of secrets may
# take after the connection. The engine answers from a thread of ZeroMQ's, which is never busy.
FIND_TIMEOUT_S = 60.0
SECRET_TIMEOUT_S = 5.0
# When the connection closes, the main thread may not have read the engine's last message yet.
LAST_MESSAGE_S = 1.0
# How long an orderly end may take.
LEAVE_TIMEOUT_S = 5.0
# Exit codes are not 0, so that torchrun starts the rank again.
EXIT_NOT_CONNECTED, EXIT_ENGINE_GONE = 2, 3
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_log = logging.getLogger(__name__)


def end_with_stdin() -> None:
    """End this process when its standard input closes. The engine holds the other end, so it has
    died or let go of this process."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


def end_with_connection(socket: zmq.Socket[bytes], address: str, stopped: threading.Event) -> None:
    """End this process when ``socket`` loses its connection to the engine on another host.

    Call this before ``socket`` connects to ``address``. A lost connection is not reopened, because
    the engine counts a lost rank as dead.

    Args:
        stopped: set when the engine has told this rank to stop; then it may end in order.
    """
    monitor = socket.get_monitor_socket(_EVENTS)

    def watch() -> None:
        _wait_for_engine(monitor, address)
        while recv_monitor_message(monitor)["event"] != zmq.EVENT_DISCONNECTED:
            pass
        if stopped.wait(LAST_MESSAGE_S):
            time.sleep(LEAVE_TIMEOUT_S)  # meanwhile the process normally ends by itself
            os._exit(0)
        _exit(EXIT_ENGINE_GONE, f"the engine at {address} is gone; this rank ends")

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


def _wait_for_engine(monitor: zmq.Socket[bytes], address: str) -> None:
    """Return when both sides have proved that they know the secret."""
    deadline = time.monotonic() + FIND_TIMEOUT_S
    has_answered = False
    while monitor.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return
        if event == zmq.EVENT_CONNECTED and not has_answered:
            has_answered = True
            deadline = time.monotonic() + SECRET_TIMEOUT_S
    if has_answered:
        _exit(
            EXIT_NOT_CONNECTED,
            f"{address} refuses this rank: FASTSERVE_CLUSTER_SECRET is not the engine's, or "
            "something else than the engine listens there",
        )
    _exit(EXIT_NOT_CONNECTED, f"no engine answers at {address} after {FIND_TIMEOUT_S:.0f} s")


def _exit(code: int, reason: str) -> None:
    _log.error("%s", reason)
    logging.shutdown()
    os._exit(code)
