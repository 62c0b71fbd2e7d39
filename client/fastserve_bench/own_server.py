"""Servers that the load test starts itself: ``fastserve serve`` with one policy after another."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fastserve_client.errors import ConnectionFailed, InvalidRequest

from fastserve_bench.connection import Target

# A large model takes minutes to load.
_START_TIMEOUT_S = 900.0
# More than the 30 s for which the server may drain.
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.1
_LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class OwnServer:
    """How to start one server."""

    arguments: Sequence[str]
    """Arguments of ``fastserve serve``, without policy and ports."""
    policy: str

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        return self.policy

    @classmethod
    def parse(cls, arguments: str, policy: str) -> OwnServer:
        """Splits the arguments. Raises InvalidRequest if quotes do not match."""
        try:
            return cls(tuple(shlex.split(arguments)), policy)
        except ValueError as error:
            raise InvalidRequest(f"serve: got {arguments!r} ({error})") from None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Target]:
        """Runs the server. It is ready while the block lasts.

        Raises:
            ConnectionFailed: it ended, or was not ready in time. The message has the last lines of
                its log.
        """
        ports = [part for kind in ("http", "grpc", "metrics") for part in (f"--{kind}-port", "0")]
        command = [sys.executable, "-m", "fastserve_backend", "serve", *self.arguments]
        with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
            log_path = Path(folder) / "server.log"
            with log_path.open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *command, "--policy", self.policy, *ports,
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    env=os.environ | {"COLUMNS": "500"},  # so that lines of the log are not wrapped
                    start_new_session=True,  # Ctrl-C is for the load test, which stops it
                )  # fmt: skip
            try:
                url = await self._endpoint(process, log_path)
                yield Target(self.policy, url, None)
            finally:
                await _stop(process)

    async def _endpoint(self, process: asyncio.subprocess.Process, log_path: Path) -> str:
        deadline_s = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline_s:
            text = log_path.read_text(encoding="utf-8", errors="replace")
            ready = re.search(r"^ *gRPC +(grpc://\S+)", text, re.MULTILINE)
            if ready is not None:
                return ready[1]
            if process.returncode is not None:
                raise self._failed(f"ended with code {process.returncode}", text)
            await asyncio.sleep(_POLL_S)
        raise self._failed(f"was not ready within {_START_TIMEOUT_S:g} s", text)

    def _failed(self, what: str, log: str) -> ConnectionFailed:
        lines = [" ".join(re.sub("[╭─╮│╰╯]+", " ", line).split()) for line in log.splitlines()]
        last = " | ".join([line for line in lines if line][-_LAST_LINES:])
        return ConnectionFailed(f"fastserve serve with policy {self.policy} {what}: {last}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Lets the server drain, and kills it if that takes too long. Its children end with it."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
