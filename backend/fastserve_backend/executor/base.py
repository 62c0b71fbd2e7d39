"""What the engine asks of the ranks, however they are reached."""

from __future__ import annotations

from typing import Protocol

from fastserve_backend.worker.messages import Ready, Setup, Step, StepResult


class Executor(Protocol):
    """All methods are called by the engine's thread alone."""

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        """Start all ranks and wait until each has loaded its part.

        Raises:
            ConfigError: the model or the configuration is at fault.
            EngineError: a rank died, or was not ready in time.
        """
        ...

    def submit(self, step: Step) -> None:
        """Begin a step. At most one may be unfinished."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step that was submitted.

        Raises:
            EngineError: a rank died or stopped answering; the executor is of no further use.
        """
        ...

    def check(self) -> None:
        """Raises EngineError if a rank died or stopped answering while nothing was running."""
        ...

    def close(self) -> None:
        """Stop all ranks and free what they hold; idempotent."""
        ...
