"""What ended jobs teach about output lengths, and the indices that follow from it."""

from __future__ import annotations

import math

from fastserve_backend.config_sections import Objective
from fastserve_backend.job import Job
from fastserve_backend.scheduler.gittins_index import Capacity, GittinsIndex
from fastserve_backend.scheduler.length_distribution import (
    DistributionOfPredicted,
    LengthDistribution,
)

# The index is computed anew when this share of the ended jobs is new to it, or this many jobs.
_NEWS = 0.1
_MOST_NEWS = 200


class IndexedLengths:
    """The lengths of all jobs, or of one class of jobs, and the index that follows from them."""

    def __init__(
        self, lengths: LengthDistribution, objective: Objective, capacity: Capacity
    ) -> None:
        self.lengths = lengths
        self.capacity = capacity
        """That of the next ``update``."""
        self._objective: Objective = objective
        self.update()

    def update(self) -> None:
        """Compute the index again."""
        self.index = GittinsIndex(self.lengths, self._objective, self.capacity)


class LearnedLengths:
    """One for all policies of an engine: each learns from the jobs of all.

    A policy counts what its jobs show in ``IndexedLengths.lengths``, and calls ``on_job_ended``.
    The indices are brought up to date later, one by one. That, and sorting jobs by new indices, is
    upkeep: one policy does a part of it in each selection, so that no selection takes long.
    """

    def __init__(self, max_model_len: int, objective: Objective, capacity: Capacity) -> None:
        self.objective: Objective = objective
        self.num_updates = 0
        """How often an index has changed, since the start."""
        self._capacity = capacity
        self.of_all = IndexedLengths(LengthDistribution(max_model_len), objective, capacity)
        self._of_class: dict[int, IndexedLengths] = {}
        self._ended_of_index = 0
        self._outdated: list[IndexedLengths] = []
        self._upkeep_s = -math.inf  # when the latest upkeep was done
        self._upkeep_by: object = None

    @property
    def is_outdated(self) -> bool:
        """Whether ``update_one`` has something to do."""
        return len(self._outdated) > 0

    @property
    def num_ended(self) -> int:
        """Jobs whose full length is known."""
        return self.of_all.lengths.num_ended

    def of_job(self, job: Job) -> tuple[IndexedLengths, ...]:
        """What learns from the job; the last one gives its order. A class holds the jobs whose
        predictions lie between two powers of two."""
        if job.predicted_tokens is None:
            return (self.of_all,)
        name = max(1, job.predicted_tokens).bit_length()
        if name not in self._of_class:
            shortest = 2 ** (name - 1)
            lengths = DistributionOfPredicted(self.of_all.lengths, shortest, 2 * shortest)
            self._of_class[name] = IndexedLengths(lengths, self.objective, self._capacity)
        return self.of_all, self._of_class[name]

    def on_job_ended(self) -> None:
        """The length of one more job was counted. If there is enough news, all indices are outdated
        from now on."""
        news = self.num_ended - self._ended_of_index
        if not self._outdated and news > min(_NEWS * self.num_ended, _MOST_NEWS):
            self._ended_of_index = self.num_ended
            self._outdated = [*self._of_class.values(), self.of_all]

    def use_capacity(self, capacity: Capacity) -> None:
        """The seats have changed. All indices are outdated from now on."""
        if capacity == self._capacity:
            return
        self._capacity = capacity
        self._outdated = [*self._of_class.values(), self.of_all]
        for one in self._outdated:
            one.capacity = capacity

    def may_do_upkeep(self, policy: object, now: float) -> bool:
        """Whether ``policy`` may do a part of the upkeep in its selection at ``now``, because no
        other policy has done so."""
        if now == self._upkeep_s and policy is not self._upkeep_by:
            return False
        self._upkeep_s, self._upkeep_by = now, policy
        return True

    def update_one(self) -> bool:
        """Compute one outdated index. Returns whether there was one."""
        if not self._outdated:
            return False
        self._outdated.pop().update()
        self.num_updates += 1
        return True
