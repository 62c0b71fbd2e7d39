"""Whether swapping a job's KV costs less than computing it again."""

from __future__ import annotations

import logging
from typing import Protocol

from fastserve_backend.job import Job
from fastserve_backend.rank_protocol.link import NO_LINK, Link

# Share of the newest transfer in the running mean of the link's speed.
_WEIGHT = 0.1
# The operating system may suspend a copy's thread. Such a copy says nothing about the link, so a
# transfer counts as at most so many times slower than the mean.
_MOST_TIMES = 4.0
_log = logging.getLogger(__name__)


class PrefillTimes(Protocol):
    def prefill_s(self, num_tokens: int) -> float: ...


class LearnedLink:
    """The speed of a link, which is learned from transfers.

    Args:
        measured: the speed before the first transfer.
    """

    def __init__(self, measured: Link) -> None:
        self._measured_s = {True: measured.block_out_s, False: measured.block_in_s}  # by is_out
        self._block_s = dict(self._measured_s)

    def observe(self, is_out: bool, num_blocks: int, seconds: float) -> None:
        """Learn that a transfer of ``num_blocks`` took the link ``seconds``."""
        known_s = self._block_s[is_out]
        each_s = min(seconds / num_blocks, _MOST_TIMES * known_s)
        self._block_s[is_out] += _WEIGHT * (each_s - known_s)

    def transfer_s(self, is_out: bool, num_blocks: int) -> float:
        """Seconds that the link takes for ``num_blocks`` blocks."""
        return num_blocks * self._block_s[is_out]

    def longest_s(self, num_blocks: int) -> float:
        """Seconds that ``num_blocks`` blocks take in the slower direction."""
        return num_blocks * max(self._block_s.values())

    def relax(self) -> None:
        """Move the learned speed a little back to the measured one.

        A transfer was not made because the link is slow. While there are none, no transfer can show
        that the link has become faster.
        """
        for is_out, measured_s in self._measured_s.items():
            self._block_s[is_out] += _WEIGHT * (measured_s - self._block_s[is_out])


class SwapCosts:
    """Compares the latency profile with the speeds of the links.

    Args:
        block_bytes: as in ``KVMemory``.
        link: between device and host.
        disk: between host and disk.
    """

    def __init__(
        self, times: PrefillTimes, block_bytes: int, link: Link, disk: Link = NO_LINK
    ) -> None:
        self.block_bytes = block_bytes
        self.link, self.disk = LearnedLink(link), LearnedLink(disk)
        self._times = times

    @property
    def least_iteration_s(self) -> float:
        """Seconds of the shortest iteration, which decodes one job."""
        return self._times.prefill_s(1)

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of an iteration that computes ``num_tokens`` tokens of one job."""
        return self._times.prefill_s(num_tokens)

    def swap_is_cheaper(
        self, job: Job, *, num_lost: int, blocks_out: int, blocks_in: int, num_running: int
    ) -> bool:
        """Whether swapping a job that must leave delays jobs less than computing its KV again.

        Copies run beside the iterations. So a swap delays this job alone, by the time on the link.
        Computing again delays the job and all jobs that run beside it.

        Args:
            num_lost: tokens whose KV nobody would have any more.
            blocks_out, blocks_in: blocks that the link copies in each direction before the job is
                back.
            num_running: jobs in an iteration.
        """
        swap_s = self.link.transfer_s(True, blocks_out) + self.link.transfer_s(False, blocks_in)
        recompute_s = self._times.prefill_s(num_lost) * (num_running + 1)
        is_cheaper = swap_s <= recompute_s
        _log.debug(
            "job %s leaves the device: swapping %d blocks delays jobs by %.2f ms, computing %d "
            "tokens again by %.2f ms: %s",
            job.id,
            blocks_in,
            swap_s * 1e3,
            num_lost,
            recompute_s * 1e3,
            "swap" if is_cheaper else "recompute",
        )
        if not is_cheaper:
            self.link.relax()
        return is_cheaper

    def read_is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether ``num_blocks`` blocks come from the disk to the device sooner than the KV of
        ``num_tokens`` tokens is computed."""
        read_s = self.disk.transfer_s(False, num_blocks) + self.link.transfer_s(False, num_blocks)
        if read_s <= self.prefill_s(num_tokens):
            return True
        self.disk.relax()
        return False
