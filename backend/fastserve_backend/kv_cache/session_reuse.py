"""Of how many tokens a turn's KV can be held, and of how many its next turn can use it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from fastserve_backend.job import Job


@dataclass(frozen=True, slots=True)
class SessionReuse:
    """What the model allows."""

    has_windows: bool
    """Some layers keep KV only of the tokens in their window."""
    rotary_switch: int | None
    """As for ``KVManager``."""

    def num_to_hold(self, job: Job) -> int:
        """Of how many tokens the ended job's KV is of use to a later turn. 0: of none."""
        # A step sent ahead may have computed a token behind a stop word.
        num_tokens = len(job.prompt_ids) + len(job.output_ids)
        if job.num_computed > num_tokens and self.has_windows:
            return 0  # the window of its last token may be gone
        return 0 if self._rotates_anew(job) else min(job.num_computed, num_tokens)

    def num_common(self, ended: Job, num_tokens: int, job: Job) -> int:
        """Of how many of its first tokens the job can use the ended one's KV.

        Args:
            num_tokens: of the ended job, whose KV is held.
        """
        if job.needs_whole_prompt:
            return 0
        held = ended.prompt_ids + ended.output_ids
        # The job has to compute at least one token to get its next one.
        most = min(num_tokens, len(job.prompt_ids) - 1)
        num_common = _num_equal(held[:most], job.prompt_ids[:most])
        if num_common < num_tokens and self.has_windows:
            return 0  # what the windows of earlier tokens saw is gone
        return 0 if self._rotates_anew(job) else num_common

    def _rotates_anew(self, job: Job) -> bool:
        """Whether the job has, or may have, other keys than a shorter job."""
        return self.rotary_switch is not None and job.num_tokens > self.rotary_switch


def _num_equal(first: array[int], second: array[int]) -> int:
    """How many tokens both begin with; they are equally long."""
    differ = np.frombuffer(first, np.int32) != np.frombuffer(second, np.int32)
    return int(differ.argmax()) if differ.any() else len(first)
