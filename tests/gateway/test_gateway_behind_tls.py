"""The gateway behind nginx with TLS, as deploy/nginx/fastserve.conf sets it up."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastserve_backend.serving.launch import TritonServer
from openai import OpenAI
from running_gateway import REQUEST_TIMEOUT_S, START_TIMEOUT_S, RunningGateway
from running_server import job_held
from serving_client import ended_jobs, wait_until_idle
from waiting import wait_for

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx" / "fastserve.conf"
MAIN = """
daemon off;
pid {directory}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/fastserve.conf;
}}
"""


@dataclass(frozen=True)
class Proxy:
    url: str
    trust: ssl.SSLContext
    """Trusts only this proxy's certificate."""

    def openai(self) -> OpenAI:
        http_client = httpx2.Client(verify=self.trust, timeout=REQUEST_TIMEOUT_S)
        url = f"{self.url}/v1"
        return OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http_client)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", verify=self.trust, timeout=REQUEST_TIMEOUT_S)


@pytest.fixture(scope="module")
def proxy(gateway: RunningGateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if nginx is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed")
    directory = tmp_path_factory.mktemp("nginx")
    certificate, key = _certificate(directory)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    text = CONFIGURATION.read_text(encoding="utf-8")
    for old, new in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/nginx/tls/llm.example.com.crt", str(certificate)),
        ("/etc/nginx/tls/llm.example.com.key", str(key)),
        ("127.0.0.1:9000", gateway.url.removeprefix("http://")),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (directory / "fastserve.conf").write_text(text, encoding="utf-8")
    main = directory / "nginx.conf"
    main.write_text(MAIN.format(directory=directory), encoding="utf-8")
    running = Proxy(f"https://127.0.0.1:{port}", ssl.create_default_context(cafile=certificate))
    with (
        listener,
        (directory / "nginx.log").open("wb") as log,
        subprocess.Popen(
            [nginx, "-e", "stderr", "-c", str(main)],
            stderr=log,
            # nginx takes the socket over, as at an upgrade of its program.
            env=os.environ | {"NGINX": f"{listener.fileno()};"},
            pass_fds=[listener.fileno()],
        ) as process,
    ):

        def is_listening() -> bool:
            assert process.poll() is None, (directory / "nginx.log").read_text(encoding="utf-8")
            try:
                return running.get("/health").status_code == 200
            except httpx2.TransportError:
                return False

        try:
            wait_for(is_listening, START_TIMEOUT_S)
            yield running
        finally:
            process.terminate()
            process.wait(REQUEST_TIMEOUT_S)


def _certificate(directory: Path) -> tuple[Path, Path]:
    certificate, key = directory / "tls.crt", directory / "tls.key"
    command = ["openssl", "req", "-x509", "-nodes", "-days", "1", "-newkey", "ec"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=gateway"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=REQUEST_TIMEOUT_S)
    return certificate, key


def test_the_official_client_over_https(proxy: Proxy) -> None:
    with proxy.openai() as client:
        answer = client.completions.create(model="fastserve", prompt="Hello", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 4


def test_tokens_come_one_by_one_and_leaving_cancels(
    proxy: Proxy, gateway: RunningGateway, server: TritonServer
) -> None:
    url = server.endpoints.metrics_url
    wait_until_idle(server.endpoints)
    cancelled = ended_jobs(url, "cancelled")
    closed = gateway.num_requests("/v1/completions", 499)
    with proxy.openai() as client:

        def start() -> Any:
            stream = client.completions.create(
                model="fastserve",
                prompt="Hello",
                max_tokens=3500,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            # If the proxy held this event back, the job would always have ended by now.
            next(iter(stream))
            return stream

        with job_held(server, start) as stream:
            stream.close()
            wait_for(lambda: gateway.num_requests("/v1/completions", 499) > closed)
    wait_for(lambda: ended_jobs(url, "cancelled") == cancelled + 1)


def test_only_the_api_is_outside(proxy: Proxy) -> None:
    assert proxy.get("/v1/models").status_code == 200
    for path in ("/metrics", "/", "/v2/health/live"):
        assert proxy.get(path).status_code == 404
    with pytest.raises(httpx2.ConnectError, match="certificate"):  # it speaks TLS
        httpx2.get(f"{proxy.url}/health", timeout=REQUEST_TIMEOUT_S)


# What the proxy does not let through: it has a route at the gateway alone.
HIDDEN = b"GET /live/servers HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (["Content-Length: 0", "Transfer-Encoding: chunked"], CHUNK),
        ([f"Content-Length: {len(CHUNK)}", "Transfer-Encoding: chunked"], CHUNK),
        (
            [f"Content-Length: {5 + len(HIDDEN)}", "Transfer-Encoding: chunked"],
            b"0\r\n\r\n" + HIDDEN,
        ),
        (
            [f"Content-Length: {5 + len(HIDDEN)}", "Transfer-Encoding: xchunked"],
            b"0\r\n\r\n" + HIDDEN,
        ),
        (
            [f"Content-Length: {5 + len(HIDDEN)}", "Transfer-Encoding : chunked"],
            b"0\r\n\r\n" + HIDDEN,
        ),
        (
            [f"Content-Length: {5 + len(HIDDEN)}", "Transfer-Encoding:\x0bchunked"],
            b"0\r\n\r\n" + HIDDEN,
        ),
        (
            [f"Content-Length: {5 + len(HIDDEN)}", "X: y\r\n Transfer-Encoding: chunked"],
            b"0\r\n\r\n" + HIDDEN,
        ),
        (["Transfer-Encoding: identity, chunked"], b"0\r\n\r\n" + HIDDEN),
        (["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], b"0\r\n\r\n" + HIDDEN),
        (["Content-Length: 0", f"Content-Length: {len(HIDDEN)}"], HIDDEN),
        ([f"Content-Length: {len(HIDDEN)}, 0"], HIDDEN),
        ([f"Content-Length: +{len(HIDDEN)}"], HIDDEN),
        (["Transfer-Encoding: chunked"], b"0\n\n" + HIDDEN),
        (["Transfer-Encoding: chunked"], b"2;\nxx" + CHUNK),
        (["Transfer-Encoding: chunked"], b"0\r\nX: y\r\n\r\n" + HIDDEN),
        (["Expect: 100-continue", f"Content-Length: {len(HIDDEN)}"], HIDDEN),
    ],
    ids=str,
)
def test_no_request_hides_in_another_one(
    proxy: Proxy, gateway: RunningGateway, headers: list[str], body: bytes
) -> None:
    before = gateway.num_requests("/live/servers", 200)
    host, port = proxy.url.removeprefix("https://").split(":")
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
    with (
        socket.create_connection((host, int(port)), REQUEST_TIMEOUT_S) as plain,
        proxy.trust.wrap_socket(plain, server_hostname=host) as connection,
    ):
        # The end tells a proxy that waits for more of a body that it has come.
        end = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        connection.sendall("\r\n".join(lines).encode() + body + end)
        with suppress(OSError):  # a proxy that refuses it may close before it has read all
            while connection.recv(1 << 16):
                pass
    assert proxy.get("/health").status_code == 200
    assert gateway.num_requests("/live/servers", 200) == before
    gateway.get("/live/servers")
    wait_for(lambda: gateway.num_requests("/live/servers", 200) == before + 1)  # so it counts
