"""Makes an engine's ranks. The first ones start before the engine itself is imported."""

from __future__ import annotations

from fastserve_backend.config_sections import ParallelSection
from fastserve_backend.executor.cluster import Cluster
from fastserve_backend.executor.distributed import DistributedExecutor


class RankFactory:
    """Starts the first ranks when it is made, and makes those that replace them.

    Ranks import torch for a second before they need to know their model. Meanwhile the caller
    imports the engine and reads the model: this module imports as little as it can.

    Close it after the engine, or if there never is one: ranks that no engine took then end.

    Raises:
        ConfigError: other hosts have ranks too, and their address or secret cannot be used.
        EngineError: a process cannot be started.
    """

    def __init__(self, parallel: ParallelSection) -> None:
        self._num_ranks = parallel.num_ranks
        self._cluster = Cluster.of(parallel)  # first: a port in use shows at once
        self._first: DistributedExecutor | None = None
        try:
            self._first = self._start()
        except BaseException:
            self.close()
            raise

    def make(self, arrivals: int) -> DistributedExecutor:
        """Ranks for the caller to start and close: the first ones, later new ones.

        Args:
            arrivals: as of ``DistributedExecutor``.

        Raises:
            ConfigError, EngineError: as the constructor.
        """
        executor, self._first = self._first, None
        if executor is None:
            executor = self._start()
        executor.arrivals = arrivals
        return executor

    def close(self) -> None:
        """End ranks that nobody took, and the cluster; idempotent."""
        if self._first is not None:
            self._first.kill()  # ranks that import hear nothing
            self._first.close()
            self._first = None
        if self._cluster is not None:
            self._cluster.close()

    def _start(self) -> DistributedExecutor:
        return DistributedExecutor(self._cluster, num_early_ranks=self._num_ranks)
