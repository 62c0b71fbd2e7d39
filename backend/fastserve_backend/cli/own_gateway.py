"""A server and a gateway of this command's own, as processes that end with it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fastserve_backend.errors import ConfigError, FastServeError
from fastserve_backend.system.interpreter import child_environment, python_executable

# A first start may download a checkpoint. What hangs later ends sooner: the server has limits of
# its own.
_SERVER_START_S = 3600.0
_GATEWAY_START_S = 300.0
# More than the 30 s for which both let requests end.
_STOP_S = 60.0
_POLL_S = 0.1
_LAST_LINES = 8
_ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
_GRPC_URL = re.compile(r"^ *gRPC +(grpc://\S+)", re.MULTILINE)
_MODEL = re.compile(r"/v2/models/(\S+)/generate_stream$", re.MULTILINE)
_GATEWAY_URL = re.compile(r"listening on (http://\S+)/v1$", re.MULTILINE)


class OwnGateway(NamedTuple):
    url: str
    models: Sequence[str]
    """Their names, in the order in which they were given."""


@contextmanager
def own_gateway(serve: str, on_progress: Callable[[str], None]) -> Iterator[OwnGateway]:
    """Runs ``fastserve serve`` and ``fastserve gateway`` on free ports of loopback, while the block
    lasts. A terminal's Ctrl-C does not reach them.

    Args:
        serve: arguments of ``fastserve serve``, as in a shell, without ports.
        on_progress: called with what is awaited, and with lines of its log.

    Raises:
        ConfigError: the arguments' quotes do not match.
        FastServeError: one of the two ended, or did not start in time; the message has the end of
            its log.
    """
    try:
        arguments = shlex.split(serve)
    except ValueError as error:
        raise ConfigError(f"serve: got {serve!r} ({error}); close each quote") from None
    with ExitStack() as at_end:
        logs = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="fastserve-launch-")))
        server = _Service("serve", [*arguments, *_ANY_PORTS], logs, on_progress)
        at_end.callback(server.stop)
        text = server.wait_for(_GRPC_URL, _SERVER_START_S)
        models = _MODEL.findall(text)
        flags = [part for name in models for part in ("--model", name)]
        grpc_url = _GRPC_URL.findall(text)[0]
        gateway = _Service("gateway", ["--port", "0", "--url", grpc_url, *flags], logs, on_progress)
        at_end.callback(gateway.stop)
        found = gateway.wait_for(_GATEWAY_URL, _GATEWAY_START_S)
        yield OwnGateway(_GATEWAY_URL.findall(found)[0], models)


class _Service:
    """One of the two commands, whose output goes to a file."""

    def __init__(
        self,
        command: str,
        arguments: Sequence[str],
        logs: Path,
        on_progress: Callable[[str], None],
    ) -> None:
        self._name = f"fastserve {command}"
        self._log_path = logs / f"{command}.log"
        self._on_progress = on_progress
        on_progress(f"starting {self._name}")
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [python_executable(), "-m", "fastserve_backend", command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Wide, so that lines of the log are not wrapped.
                env=child_environment() | {"COLUMNS": "500"},
                start_new_session=True,
            )

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> str:
        """The log, once it matches. Raises FastServeError."""
        deadline_s = time.monotonic() + timeout_s
        shown = 0
        while time.monotonic() < deadline_s:
            has_ended = self._process.poll() is not None  # before its last lines are read
            text = self._log_path.read_text(encoding="utf-8", errors="replace")
            # Only whole lines: the last one may be half written.
            text = text[: text.rfind("\n") + 1]
            if pattern.search(text):
                return text
            if has_ended:
                raise self._failed(f"ended with code {self._process.returncode}")
            if len(text) > shown:
                self._on_progress(f"starting {self._name}: {text.splitlines()[-1].strip()}")
                shown = len(text)
            time.sleep(_POLL_S)
        raise self._failed(f"was not ready within {timeout_s:g} s")

    def stop(self) -> None:
        """Lets requests end, and kills the process if that takes too long."""
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        finally:
            with suppress(ProcessLookupError):  # also what it started, if it hung or died
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _failed(self, what: str) -> FastServeError:
        log = self._log_path.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return FastServeError(f"{self._name} {what}: {' | '.join(lines[-_LAST_LINES:])}")


def run_until_it_ends(command: Sequence[str], environment: dict[str, str]) -> int:
    """Runs a program in the terminal, which is its own meanwhile, and returns its exit code.

    Ctrl-C and other signals of the terminal reach the program, and are for it alone. SIGTERM and
    SIGHUP are passed on to it. Only for the main thread.
    """
    process = subprocess.Popen(command, env=environment)
    previous = {signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None)}
    for ending in (signal.SIGTERM, signal.SIGHUP):
        previous[ending] = signal.signal(ending, lambda number, frame: process.send_signal(number))
    try:
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code  # as shells have it


def end_on_signals() -> None:
    """Makes SIGTERM and SIGHUP an ordinary end, so that what was started ends too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
