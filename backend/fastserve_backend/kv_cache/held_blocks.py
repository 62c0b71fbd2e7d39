"""How many blocks held KV has. Every decision needs the sums, so each change updates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of held KV."""

    device: int = 0
    idle_device: int = 0
    """Those that no transfer and no step copies."""
    idle_host: int = 0
    host_alone: int = 0
    """Host blocks of KV that is not on the device."""


class HeldJobs:
    """The ended jobs whose KV is held, by number."""

    def __init__(self) -> None:
        self._blocks: dict[int, HeldBlocks] = {}
        self.total = HeldBlocks()
        """Blocks of all of them."""

    def __contains__(self, job_number: int) -> bool:
        return job_number in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def set_blocks(self, job_number: int, blocks: HeldBlocks) -> None:
        """The job, which may be new, has these blocks now."""
        before, total = self._blocks.get(job_number, HeldBlocks()), self.total
        self.total = HeldBlocks(
            total.device + blocks.device - before.device,
            total.idle_device + blocks.idle_device - before.idle_device,
            total.idle_host + blocks.idle_host - before.idle_host,
            total.host_alone + blocks.host_alone - before.host_alone,
        )
        self._blocks[job_number] = blocks

    def remove(self, job_number: int) -> None:
        """The job's KV, if it is held at all, is held no longer."""
        if job_number in self._blocks:
            self.set_blocks(job_number, HeldBlocks())
            del self._blocks[job_number]

    def check(self, counted: Mapping[int, HeldBlocks]) -> None:
        """Raise AssertionError unless these are the blocks of each job, and the sums are right."""
        assert self._blocks == counted, "blocks of a held job"
        sums = tuple(map(sum, zip(*map(astuple, counted.values()), strict=True)))
        assert astuple(self.total) == (sums or astuple(HeldBlocks())), "blocks of held jobs"
