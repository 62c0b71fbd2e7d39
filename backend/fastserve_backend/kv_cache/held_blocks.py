"""Jobs that have ended, and whose KV is held for their sessions' next turns."""

from __future__ import annotations

from collections.abc import Iterator

from fastserve_backend.kv_cache.blocks import BlockPool


class HeldKV:
    """Which jobs these are, and how many blocks only they have."""

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self._pools = device, host
        self.jobs, self._idle_device = device.job_set(), device.job_set()
        self._idle_host, self._host_alone = host.job_set(), host.job_set()

    @property
    def device(self) -> int:
        """Device blocks."""
        return self.jobs.num_alone

    @property
    def idle_device(self) -> int:
        """Device blocks that no transfer copies."""
        return self._idle_device.num_alone

    @property
    def idle_host(self) -> int:
        """Host blocks that no transfer copies."""
        return self._idle_host.num_alone

    @property
    def host_alone(self) -> int:
        """Host blocks of KV that is not on the device."""
        return self._host_alone.num_alone

    def __contains__(self, job_number: int) -> bool:
        return job_number in self.jobs

    def __iter__(self) -> Iterator[int]:
        return iter(self.jobs)

    def update(self, job_number: int, *, is_held: bool, is_idle: bool = True) -> None:
        """The job's KV is held from now on, or no longer, or it has moved.

        Args:
            is_idle: no transfer copies it.
        """
        device, host = self._pools
        is_on_device = device.num_held(job_number) > 0
        device.set_member(self.jobs, job_number, is_held)
        device.set_member(self._idle_device, job_number, is_held and is_idle)
        host.set_member(self._idle_host, job_number, is_held and is_idle)
        host.set_member(self._host_alone, job_number, is_held and is_idle and not is_on_device)
