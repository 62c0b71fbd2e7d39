"""What the engine asks of the ranks, however they are reached."""

from __future__ import annotations

from typing import Protocol

from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    Ready,
    Setup,
    Step,
    StepResult,
)


class Executor(Protocol):
    """All methods are called by one thread at a time."""

    @property
    def can_submit(self) -> bool:
        """Whether the first pipeline stage is free. With one stage: no step is unfinished."""
        ...

    @property
    def can_submit_ahead(self) -> bool:
        """Whether the ranks run a single step and take one more, which begins when that one has
        ended and may run its tokens (``Step.previous_rows``)."""
        ...

    def submit(self, step: Step) -> None:
        """Begin a step; only if ``can_submit`` or ``can_submit_ahead``."""
        ...

    def copy(self, blocks: CopyBlocks) -> None:
        """Begin a copy of KV blocks, at any time; it goes on while steps run. Ranks on a CPU may
        begin it only when they have done the steps that were submitted before it."""
        ...

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        """Wait until the oldest unfinished step ends, any copy ends, the first stage is free, or
        ``timeout_s`` have passed.

        There must be an unfinished step or copy. None: nothing ended, and it may be worth
        submitting another step.

        Raises:
            EngineError: a rank died or stopped answering, or a step or a copy does not end; the
                executor is of no further use.
        """
        ...

    def check(self) -> None:
        """Raises EngineError if a rank died or stopped answering while nothing was running."""
        ...


class OwnedExecutor(Executor, Protocol):
    """Ranks that whoever holds this has to start and to stop."""

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        """Start all ranks and wait until each has loaded its part.

        Raises:
            ConfigError: the model or the configuration is at fault.
            EngineError: a rank died, or was not ready in time.
        """
        ...

    def kill(self) -> None:
        """End all ranks at once, also stopped ones and those that load. From any thread, at any
        time before ``close`` returns: a ``start`` under way then raises EngineError."""
        ...

    def close(self) -> None:
        """Stop all ranks and free what they hold; idempotent."""
        ...
