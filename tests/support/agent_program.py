"""Programs of agents as a user runs them, in a home directory of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = Path(__file__).parents[2] / "build/agents"
"""What ``make test-agents`` installs."""
BINARIES = PROGRAMS / "node_modules/.bin"
KNOWN_TO_CODEX = "gpt-5.5"
"""Codex has instructions and tools of its own for this model."""
# An agent plays many turns, each of which computes some ten thousand tokens.
TIMEOUT_S = 540.0
# Inputs of its own environment that an agent would obey, such as keys, are not passed on.
_PASSED_ON = ("LANG", "TERM", "TMPDIR", "SSL_CERT_FILE")


@dataclass(frozen=True)
class AgentProgram:
    """An agent in the directory ``work``, and by default against a gateway.

    Its settings come from ``fastserve launch``, or from ``environment`` alone if it names a URL of
    an API.
    """

    name: str
    home: Path
    work: Path
    launched_with: Sequence[str] = ()
    """Options of ``fastserve launch``; none: the program is started directly."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, text: str = "") -> str:
        """What it prints. It must end with exit code 0."""
        done = subprocess.run(
            self._command(arguments),
            cwd=self.work,
            env=self._environment(),
            input=text,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def interrupted(self, *arguments: str) -> Iterator[None]:
        """Interrupts it at the end of the block, as Ctrl-C does, and waits until it has ended."""
        with subprocess.Popen(
            self._command(arguments),
            cwd=self.work,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                yield
                process.send_signal(signal.SIGINT)
                process.wait(TIMEOUT_S)
            finally:
                process.kill()

    def _command(self, arguments: Sequence[str]) -> list[str]:
        if not self.launched_with:
            return [str(BINARIES / self.name), *arguments]
        command = [sys.executable, "-m", "fastserve_backend", "launch", self.name]
        return [*command, *self.launched_with, "--", *arguments]

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        path = f"{BINARIES}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "HOME": str(self.home), "PATH": path, **self.environment}


StartAgent = Callable[..., AgentProgram]
"""A fixture's function: the agent's name, options of ``fastserve launch``, and variables of the
environment by their names."""
