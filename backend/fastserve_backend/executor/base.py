"""The interface between the engine and the ranks."""

from __future__ import annotations

from typing import Protocol

from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
    Ready,
    Setup,
    Step,
    StepResult,
)


class Executor(Protocol):
    """Runs steps and copies on ranks. All methods are called by one thread at a time."""

    @property
    def can_submit(self) -> bool:
        """Whether the first pipeline stage is free. With one stage: no step is unfinished."""
        ...

    @property
    def can_submit_ahead(self) -> bool:
        """Whether one step runs, and the ranks take another that begins when it ends. The second
        may run tokens of the first (``Step.previous_rows``)."""
        ...

    def submit(self, step: Step) -> None:
        """Send a step; only if ``can_submit`` or ``can_submit_ahead``."""
        ...

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        """Send a copy of KV blocks, at any time; it goes on while steps run. Ranks on a CPU may
        begin it only after the steps that were submitted before it."""
        ...

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        """Wait until the oldest unfinished step ends, any copy ends, the first stage is free, or
        ``timeout_s`` have passed.

        There must be an unfinished step or copy. None: neither has ended, and the caller may want
        to submit another step, because the first stage is free or there is an arrival.

        Raises:
            EngineError: a rank died or stopped answering, or a step or a copy does not end. The
                executor cannot be used any more.
        """
        ...

    def check(self) -> None:
        """Check the ranks while nothing runs. Raises EngineError: one died or stopped answering."""
        ...


class OwnedExecutor(Executor, Protocol):
    """Ranks that the owner starts and stops."""

    @property
    def listened_s(self) -> float:
        """Seconds for which this process has listened to the ranks. It grows at least once a second
        during ``collect``. Any thread may ask."""
        ...

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        """Start all ranks and wait until each has loaded its part.

        Raises:
            ConfigError: the model or the configuration is at fault.
            EngineError: a rank died, or was not ready in time.
        """
        ...

    def kill(self) -> None:
        """End all ranks at once, also while they load or hang. May be called by any thread until
        ``close`` returns. A ``start`` under way then raises EngineError."""
        ...

    def close(self) -> None:
        """Stop all ranks and free their resources; idempotent."""
        ...
