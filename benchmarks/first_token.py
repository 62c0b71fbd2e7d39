"""How long a newly started server takes to answer its first HTTP request.

    python -m benchmarks.first_token              # seven starts of the embedded model
    python -m benchmarks.first_token --repeats 3

Seconds from the start of `fastserve serve` to the first token. A client asks again and again from
the beginning. The first start may compile kernels and measure the latency profile: it is not
counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time

from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL

PATH = "/v2/models/fastserve/generate_stream"
BODY = json.dumps({"text_input": "Hello", "max_tokens": 4, "temperature": 0.0, "stream": True})
# Between two attempts to connect.
RETRY_S = 0.005
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    seconds_to_first_token()
    times = [seconds_to_first_token() for _ in range(repeats)]
    print(
        f"first token after {statistics.median(times):.2f} s "
        f"[{min(times):.2f}, {max(times):.2f}], {repeats} starts"
    )


def seconds_to_first_token() -> float:
    """Of one server, which is stopped afterwards.

    Raises:
        RuntimeError: the server ended, or answered with an error.
        TimeoutError: it was not ready within `START_TIMEOUT_S`.
    """
    http_port, grpc_port, metrics_port = _free_ports(3)
    command = [sys.executable, "-m", "fastserve_backend", "serve", EMBEDDED_MODEL]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    command += ["--metrics-port", str(metrics_port)]
    began_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not _has_answered(http_port):
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended with code {server.returncode}")
                if time.monotonic() - began_s > START_TIMEOUT_S:
                    raise TimeoutError("the server is not ready")
                time.sleep(RETRY_S)
            return time.monotonic() - began_s
        finally:
            server.terminate()
            server.wait(STOP_TIMEOUT_S)


def _has_answered(port: int) -> bool:
    """Whether the first token of a request has come; False: nobody listens yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_TIMEOUT_S)
    try:
        connection.request("POST", PATH, BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        line = response.readline()
    except (ConnectionError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK or b"text_output" not in line:
        raise RuntimeError(f"the server answered {response.status}: {line.decode()}")
    return True


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


if __name__ == "__main__":
    main()
