"""One run of a tritonserver: its command line, its readiness, its end."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from fastserve_client.protocol import (
    MAX_TOKENS,
    TEMPERATURE,
    TENANT,
    TEXT_INPUT,
    TRACE_HEADERS,
    TRACEPARENT,
)

from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.errors import LaunchError, ModelLoadError
from fastserve_backend.serving.grpc_status import GRPC_STATUS_HEADER
from fastserve_backend.serving.installation import TritonInstallation
from fastserve_backend.serving.liveness import AnswerCount, ProcessLife
from fastserve_backend.serving.runtime import RuntimeDirectory, wait_readable
from fastserve_backend.serving.stubs import LoadedStubs

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 30
"""How long a stopping server may take to finish streams in flight (tritonserver's default)."""
# A drain that takes longer is announced: without a word it looks like a server that hangs.
_SILENT_DRAIN_S = 1.0
# Unfinished streams then end with an error, after the running step.
_END_TIMEOUT_S = 5.0

# A server without streams in flight needs two seconds. A server with a leaked request would wait in
# vain: Triton 24.10 leaks requests of gRPC streams that it refuses itself, and sometimes one that
# is cancelled while its last response is on the way.
_EXIT_TIMEOUT_S = 5.0
_DRAIN_POLL_S = 0.05
# For the start of the stub's interpreter; loading the model does not count.
_STUB_TIMEOUT_S = 120
# Triton's threads that take responses from the stub: one for each emitter, which awaits its answer.
# With the usual 32, each response wakes another thread, whose memory is not in the core's cache.
_RESPONSE_THREADS = 2
_READY_POLL_S = 0.05
# How long a question to a server that works may take on a busy machine.
_LIVE_TIMEOUT_S = 5.0
# After its models are loaded, tritonserver is ready within milliseconds. It was seen to wait for
# ever (docs/several_models.md).
_UNNOTICED_S = 30.0
_PROBE_PROMPT = "Hello"
# W3C's trace context of a request that nobody traces.
_NOT_SAMPLED = f"00-{1:032x}-{1:016x}-00"
# A server says in the last lines of its log why it ended, but not in tables and notes.
_LOG_TAIL_BYTES = 16384
_LOG_TAIL_LINES = 8
_LOG_NOISE = re.compile(r"[+|]|I\d{4} |\s*$")

# Connections and files, if the system allows so many. A server that runs out of them repeats a line
# in its log, hundreds of MB in seconds. With far more, code that closes all possible ones is slow.
_MAX_OPEN_FILES = 65536

# The python backend makes such a directory in every server; a killed server leaves it behind.
_BACKEND_DIRECTORIES = ("/tmp", "python_env_??????")

# Twice what the largest conversation may have (`codec.MAX_MESSAGES_BYTES`): JSON escapes quotes.
_MAX_HTTP_INPUT_BYTES = 32 << 20

ADMIN_HEADER = "fastserve-admin"
"""The header of HTTP requests that has the key of the restricted APIs."""
_RESTRICTED_APIS = "model-repository,shared-memory,trace,logging"


class ServerProcess:
    """A started tritonserver. Call ``stop`` even if ``await_ready`` raised.

    Args:
        flags: of tritonserver, beside those that are the same for all.
        probe_tenants: by the name of each model, a tenant that it knows, whose request tries it.
        loads_others: whether the server waits for other models, too, before it is ready.
    """

    def __init__(
        self,
        installation: TritonInstallation,
        runtime: RuntimeDirectory,
        endpoints: Endpoints,
        log_path: Path | None,
        flags: list[str],
        probe_tenants: Mapping[str, str],
        *,
        loads_others: bool,
    ) -> None:
        self._runtime = runtime
        self._loads_others = loads_others
        self._loaded_s: float | None = None  # since when all models are loaded
        self._probe_tenants = probe_tenants
        self._endpoints = endpoints
        self._log_path = log_path
        self.stubs = LoadedStubs(runtime)
        self._foreign_directories = _backend_directories()
        self._own_directories: set[Path] | None = None  # known once the server is ready
        runtime.clear_reports()
        common = _flags(runtime, endpoints, installation.offered_flags())
        command = [str(installation.binary), *flags, *common]
        environment = installation.environment(os.environ) | runtime.environment()
        log: IO[bytes] | None = None if log_path is None else log_path.open("ab")
        try:
            # Its own session: Ctrl-C in the terminal must reach the launcher alone, which drains.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log is not None else None,
                env=environment,
                start_new_session=True,
                # SIGPIPE stays ignored: the server must survive the reader of its output.
                restore_signals=False,
            )
        except OSError as error:
            raise LaunchError(f"cannot run {installation.binary}: {error}") from None
        finally:
            if log is not None:
                log.close()
        self.handle = os.pidfd_open(self._process.pid)
        """A pidfd, which is readable once the server has ended."""
        self._life = ProcessLife(self._process.pid)
        self._liveness: AnswerCount | None = None  # once the server is ready
        self._raise_limit_of_open_files()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def await_ready(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        """Returns when each model has generated a token.

        Args:
            deadline: of ``time.monotonic()``.
            cancelled: asked while waiting; True ends the wait with a LaunchError.

        Raises:
            ModelLoadError: a model failed to load, or answered with an error, which is the
                message.
            LaunchError: the server ended, or was not ready in time.
        """
        models = list(self._probe_tenants)
        for path in ("/v2/health/ready", *(f"/v2/models/{name}/ready" for name in models)):
            while not self._answers(path):
                self._check_waiting(deadline, cancelled)
                self._check_noticed()
                wait_readable(_READY_POLL_S, self.handle)
        self._own_directories = self._new_directories()
        self.stubs.update()
        if missing := set(models) - self.stubs.models:
            foreign = ", ".join(sorted(missing))
            raise LaunchError(f"the server does not run this model ({foreign}){self._log_hint()}")
        self._probe(deadline, cancelled)
        self._liveness = AnswerCount(
            lambda: self._request("GET", "/v2/health/live", None, _LIVE_TIMEOUT_S)
        )

    def find_hung(self) -> str | None:
        """Says which process of a server that was ready does nothing any more; None: all work. To
        be asked every ``LOOK_INTERVAL_S``."""
        fault = self._life.find_fault(None if self._liveness is None else self._liveness.number)
        return self.stubs.find_hung() if fault is None else f"tritonserver {fault}"

    def drain(self, hurrying: Callable[[], bool]) -> None:
        """Returns when all requests are answered, late ones with an error, or when the server or
        a stub has ended.

        Args:
            hurrying: asked while waiting; True ends unfinished requests at once.
        """
        self._runtime.drain_wanted.set()
        if self._await_drained(_SILENT_DRAIN_S, hurrying):
            return
        if not hurrying():
            logger.warning(
                "waiting up to %d s for requests that still run; another Ctrl-C ends them now",
                DRAIN_TIMEOUT_S,
            )
        if not self._await_drained(DRAIN_TIMEOUT_S - _SILENT_DRAIN_S, hurrying):
            logger.warning("ending the unfinished requests")
            self._runtime.end_wanted.set()
            self._await_drained(_END_TIMEOUT_S)

    def stop(self, *, kill: bool) -> None:
        """End server, stubs and ranks, and remove the files that they left. Call it once.

        Args:
            kill: end them at once, because a server whose stub is gone would hang.
        """
        if not kill and self._process.poll() is None:
            self._process.terminate()
            if not wait_readable(_EXIT_TIMEOUT_S, self.handle):
                logger.warning("tritonserver did not end after SIGTERM; killing it")
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._liveness is not None:
            self._liveness.close()
        self._runtime.kill_processes()
        self._runtime.remove_shared_memory()
        self._remove_directory()
        self.stubs.close()
        os.close(self.handle)

    def _raise_limit_of_open_files(self) -> None:
        """The limit that a shell sets is mostly 1024."""
        with suppress(ProcessLookupError):  # it ended already
            now, most = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
            if now != resource.RLIM_INFINITY and now < _MAX_OPEN_FILES:
                is_limited = most != resource.RLIM_INFINITY
                wanted = min(most, _MAX_OPEN_FILES) if is_limited else _MAX_OPEN_FILES
                resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (wanted, most))

    def _remove_directory(self) -> None:
        """Remove the backend's directory, which a killed server leaves behind."""
        if self._process.returncode >= 0:
            return
        found = self._own_directories
        if found is None:
            found = self._new_directories()
        # With two directories, one belongs to another server that has just started and needs it.
        if len(found) == 1:
            with suppress(OSError):
                found.pop().rmdir()

    def _new_directories(self) -> set[Path]:
        """Directories of backends that did not exist before this server."""
        return _backend_directories() - self._foreign_directories

    def _await_drained(
        self, timeout_s: float, hurrying: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until all requests are answered, or a process has ended; False: time is up, or
        there is a hurry."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.stubs.update()
            if all(one.drained.is_set() for one in self.stubs.reports):
                return True
            if wait_readable(_DRAIN_POLL_S, self.handle) or self.stubs.ended_model() is not None:
                return True
            if hurrying() or time.monotonic() > deadline:
                return False

    def _check_waiting(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        for reports in self._runtime.stub_reports():
            if (reason := reports.failure()) is not None:
                wait_readable(_EXIT_TIMEOUT_S, self.handle)  # it ends by itself, and cleanly
                raise ModelLoadError(self._naming(reports.model(), reason))
        code = self._process.poll()
        if code is not None:
            raise LaunchError(
                f"tritonserver ended with code {code} before it was ready{self._log_hint()}"
            )
        if (name := self.stubs.ended_model()) is not None:
            raise LaunchError(f"the process of {name} ended early{self._log_hint()}")
        if cancelled():
            raise LaunchError("stopped before the server was ready")
        if time.monotonic() > deadline:
            raise LaunchError(f"the server was not ready in time{self._log_hint()}")

    def _check_noticed(self) -> None:
        self.stubs.update()
        if self._loads_others or not self._probe_tenants.keys() <= self.stubs.models:
            return
        now = time.monotonic()
        self._loaded_s = self._loaded_s or now
        if now > self._loaded_s + _UNNOTICED_S:
            raise LaunchError(
                f"tritonserver has not noticed for {_UNNOTICED_S:.0f} s that its models are loaded"
            )

    def _answers(self, path: str) -> bool:
        try:
            return self._request("GET", path, None, timeout_s=1.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _probe(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        # In a thread, because a server without its stub neither answers nor hangs up.
        problems: list[LaunchError] = []
        timeout_s = max(deadline - time.monotonic(), 1.0)
        probe = threading.Thread(target=self._generate, args=(timeout_s, problems), daemon=True)
        probe.start()
        while probe.is_alive():
            self._check_waiting(deadline, cancelled)
            probe.join(_READY_POLL_S)
        if problems:
            self._check_waiting(deadline, cancelled)  # the end of a process explains more
            raise problems[0]

    def _generate(self, timeout_s: float, problems: list[LaunchError]) -> None:
        for name, tenant in self._probe_tenants.items():
            self._generate_with(name, tenant, timeout_s, problems)

    def _generate_with(
        self, name: str, tenant: str, timeout_s: float, problems: list[LaunchError]
    ) -> None:
        body = json.dumps(
            {
                TEXT_INPUT: _PROBE_PROMPT,
                MAX_TOKENS: 1,
                TEMPERATURE: 0.0,
                TENANT: tenant,
                TRACEPARENT: _NOT_SAMPLED,
            }
        )
        path = f"/v2/models/{name}/generate"
        try:
            status, answer = self._request("POST", path, body, timeout_s)
            reason = "" if status == http.HTTPStatus.OK else json.loads(answer)["error"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            reason = f"{error!r}{self._log_hint()}"
            problems.append(LaunchError(self._naming(name, f"no token from the model: {reason}")))
            return
        if status != http.HTTPStatus.OK:
            # Other clients may have filled the queue already; another start may find room.
            is_full = status == http.HTTPStatus.SERVICE_UNAVAILABLE
            kind = LaunchError if is_full else ModelLoadError
            problems.append(kind(self._naming(name, f"no token from the model: {reason}")))

    def _request(
        self, method: str, path: str, body: str | None, timeout_s: float
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(
            self._endpoints.reachable_host, self._endpoints.http_port, timeout=timeout_s
        )
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def _naming(self, name: str, reason: str) -> str:
        """The reason, with the model's name where there are several."""
        return reason if len(self._probe_tenants) == 1 else f"{name}: {reason}"

    def _log_hint(self) -> str:
        if self._log_path is None:
            return "; its output is above"
        with self._log_path.open("rb") as file:
            file.seek(max(0, self._log_path.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        reasons = [line for line in lines if not _LOG_NOISE.match(line)]
        return f"; the end of {self._log_path}:\n" + "\n".join(reasons[-_LOG_TAIL_LINES:])


def _backend_directories() -> set[Path]:
    parent, pattern = _BACKEND_DIRECTORIES
    return set(Path(parent).glob(pattern))


def _flags(runtime: RuntimeDirectory, endpoints: Endpoints, offered: frozenset[str]) -> list[str]:
    http_host = grpc_host = endpoints.host
    if ":" in endpoints.host:  # IPv6, as libevent and as gRPC want it
        http_host, grpc_host = f"ipv6:{endpoints.host}", f"[{endpoints.host}]"
    # Each of these interfaces lets clients change the server.
    restriction = f"{_RESTRICTED_APIS}:{ADMIN_HEADER}={runtime.admin_key()}"
    return [
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={DRAIN_TIMEOUT_S}",
        f"--http-address={http_host}",
        f"--http-port={endpoints.http_port}",
        f"--grpc-address={grpc_host}",
        f"--grpc-port={endpoints.grpc_port}",
        f"--metrics-address={http_host}",
        f"--metrics-port={endpoints.metrics_port}",
        # The server would poll the hardware, but an idle server should be idle.
        "--allow-cpu-metrics=false",
        "--allow-gpu-metrics=false",
        f"--http-restricted-api={restriction}",
        f"--grpc-restricted-protocol={restriction}",
        # The server notices within 15 s that a client vanished without closing its connection. With
        # less, a client that pauses for some seconds, as on a busy machine, would lose its answers,
        # and a gateway those of all its clients.
        "--grpc-keepalive-time=5000",
        "--grpc-keepalive-timeout=10000",
        "--grpc-http2-max-pings-without-data=0",
        f"--backend-config=python,shm-region-prefix-name={runtime.shared_memory_prefix}",
        f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT_S}",
        f"--backend-config=python,thread-pool-size={_RESPONSE_THREADS}",
        *_flags_by_release(offered),
    ]


def _flags_by_release(offered: frozenset[str]) -> Iterator[str]:
    if "http-max-input-size" in offered:  # since 25.06
        yield f"--http-max-input-size={_MAX_HTTP_INPUT_BYTES}"
    forwarded: tuple[str, ...] = TRACE_HEADERS
    if "allow-client-shm" in offered:  # since 26.04
        yield "--allow-client-shm=false"
    else:
        # Releases since 26.05 refuse requests whose forwarded headers have names of Triton's own.
        # Since 26.04 a response after such a stream's error does no harm (server#8708).
        forwarded = (GRPC_STATUS_HEADER, *TRACE_HEADERS)
    yield f"--grpc-header-forward-pattern=^({'|'.join(forwarded)})$"
