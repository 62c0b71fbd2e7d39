"""KV of running jobs for jobs beside them that begin with the same tokens.

These copy the blocks, on the device, when they begin to run. So a block is one job's as ever, and
that others begin alike makes no difference to swapping and freeing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import islice

from fastserve_backend.job import Job
from fastserve_backend.kv_cache.prefix_keys import PrefixKeys


@dataclass(slots=True)
class PrefixCopies:
    """What ranks copy before they run a step: ``from_blocks[i]`` to ``to_blocks[i]``."""

    from_blocks: array[int] = field(default_factory=lambda: array("i"))
    to_blocks: array[int] = field(default_factory=lambda: array("i"))
    sources: set[int] = field(default_factory=set)
    """Numbers of the jobs whose blocks are copied."""


class SharedPrefixes:
    """Knows of each beginning the jobs that have it on the device."""

    def __init__(self, keys: PrefixKeys) -> None:
        self._keys = keys
        self._known: dict[int, list[bytes]] = {}  # by job
        # Of each key, in order of coming; a dict as an ordered set.
        self._holders: dict[bytes, dict[int, None]] = {}

    def add(self, job: Job) -> None:
        """What the job has computed is there for all steps that are sent from now on."""
        known = self._known.setdefault(job.number, [])
        for key in islice(self._keys.held(job), len(known), None):
            self._holders.setdefault(key, {})[job.number] = None
            known.append(key)

    def knows(self, job: Job) -> bool:
        """Whether the job has computed something that is on the device."""
        return job.number in self._known

    def remove(self, job: Job) -> None:
        """The job's KV leaves the device."""
        for key in self._known.pop(job.number, ()):
            del self._holders[key][job.number]
            if not self._holders[key]:
                del self._holders[key]

    def find(self, job: Job) -> list[int]:
        """For each block behind those that the job has, up to the first that nobody has: who has
        it."""
        found = []
        for key in islice(self._keys.wanted(job), job.num_computed // self._keys.block_size, None):
            if key not in self._holders:
                break
            found.append(next(iter(self._holders[key])))
        return found
