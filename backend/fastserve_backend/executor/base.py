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

    @property
    def can_submit(self) -> bool:
        """Whether the first pipeline stage is free. With one stage: no step is unfinished."""
        ...

    def submit(self, step: Step) -> None:
        """Begin a step; only if ``can_submit``."""
        ...

    def collect(self) -> StepResult | None:
        """Wait until the oldest unfinished step ends, or until the first stage is free for another.

        There must be an unfinished step. None: it goes on, and it may be worth submitting another.

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
