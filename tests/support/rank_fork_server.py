"""A process that has imported a rank's modules and forks into ranks. See ``forked_ranks``.

Its argument is the program of these ranks, as module:function.

Its standard input is a socket with a request for each rank: arguments, variables and directory as
JSON, and four descriptors. These are the rank's standard input, output and error, and a pipe for
its exit status. The answer is the rank's process id, with a pidfd. The end is the status that
``waitpid`` has.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress

from fastserve_backend.system.lasting_imports import lasting_imports

module, _, function = sys.argv[1].partition(":")
with lasting_imports():
    import fastserve_backend.worker.worker  # noqa: F401

    run_rank = getattr(importlib.import_module(module), function)

MOST_REQUEST_BYTES = 2**20


def serve(requests: socket.socket) -> bool:
    """Forks ranks until the other end closes. Returns True in each rank, which then runs."""
    poller = select.poll()
    poller.register(requests, select.POLLIN)
    ends: dict[int, tuple[int, int]] = {}  # by pidfd: the process and the pipe for its end
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in ends:
                pid, end = ends.pop(descriptor)
                _, status = os.waitpid(pid, 0)
                poller.unregister(descriptor)
                with suppress(BrokenPipeError):  # no process may wait for it any more
                    os.write(end, str(status).encode())
                os.close(end)
                os.close(descriptor)
                continue
            message, passed, _, _ = socket.recv_fds(requests, MOST_REQUEST_BYTES, 4)
            if not message:
                return False
            *standard, end = passed
            pid = os.fork()
            if pid == 0:
                requests.close()
                os.close(end)
                for pidfd, (_, others_end) in ends.items():
                    os.close(pidfd)
                    os.close(others_end)
                become(json.loads(message), standard)
                return True
            for one in standard:
                os.close(one)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(requests, [str(pid).encode()], [pidfd])
            ends[pidfd] = pid, end
            poller.register(pidfd, select.POLLIN)


def become(request: dict[str, object], standard: list[int]) -> None:
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["variables"])  # type: ignore[arg-type]
    os.chdir(request["directory"])  # type: ignore[arg-type]
    sys.argv = request["arguments"]  # type: ignore[assignment]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    channel = socket.socket(fileno=os.dup(0))
    is_rank = serve(channel)
    sys.exit(run_rank() if is_rank else 0)
