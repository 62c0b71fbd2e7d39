"""Choose and send a step while the step before it still runs.

Otherwise the ranks would be idle from one step's tokens to the arrival of the next step. So the
loop chooses the next step shortly before the running one is predicted to end. From then on the
running step counts as ended: each of its jobs has a pending token, whose value the loop does not
know yet.

* A job that reaches ``max_tokens`` with its pending token is not chosen.
* A job whose pending token turns out to end it has run once too often. The last token is ignored.
* A job with structured output needs the pending token for its next mask, and one with bad words of
  several tokens for its next bans. While such a job gets a token, no step is sent ahead.
* A job that its pending token makes longer than the model's ``rotary_switch`` is not chosen: it
  computes its KV again.

Only ranks without pipeline stages take a step ahead (``Executor.can_submit_ahead``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastserve_backend.engine.sent_work import SentStep
from fastserve_backend.job import Job, JobState
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.scheduler.base import Scheduled
from fastserve_backend.system.clock import Clock

# The next step is chosen this long before the predicted end of the running one: the time to choose,
# send and wake up, and a share of the prediction, because predictions err.
LEAD_S = 0.002
LEAD_SHARE = 0.1


@dataclass(slots=True)
class EarlyEnd:
    """A running step that counts as ended, because the next step has been chosen."""

    sent: SentStep
    going_on: list[Scheduled]
    """The part of its batch that may be in the next step: jobs that will not surely end."""
    set_aside: list[Job] = field(default_factory=list)
    """Jobs of ``going_on`` that are not in the next step. Some may turn out to have ended."""

    @property
    def numbers_going_on(self) -> set[int]:
        return {job.number for job, _ in self.going_on}

    @property
    def rows(self) -> dict[int, int]:
        """Index of each job, by its number, in the result of the running step."""
        return {number: row for row, number in enumerate(self.sent.jobs)}


class StepsAhead:
    """Decides when the running step counts as ended.

    Args:
        predict_s: predicted duration of a step in seconds. Not called if no step is sent ahead.
    """

    def __init__(
        self, clock: Clock, predict_s: Callable[[Step], float], rotary_switch: int | None
    ) -> None:
        self._clock = clock
        self._rotary_switch = rotary_switch
        self._predict_s = predict_s
        self._early_end: EarlyEnd | None = None

    def due_in_s(self, running: SentStep) -> float | None:
        """Seconds until the next step is to be chosen. None: not before the running one ends."""
        if self._early_end is not None:
            return None
        if running.predicted_s is None:
            if running.decides_choices:
                return None
            running.predicted_s = self._predict_s(running.step)
        wait_s = (1 - LEAD_SHARE) * running.predicted_s - LEAD_S
        return max(0.0, running.started_s + wait_s - self._clock.now())

    def end_early(self, running: SentStep) -> EarlyEnd:
        """From now on the running step counts as ended."""
        going_on = [
            one for one in running.batch if not _will_end(one.job) and not self._switches(one.job)
        ]
        self._early_end = EarlyEnd(running, going_on)
        return self._early_end

    def on_step_finished(self, sent: SentStep) -> EarlyEnd | None:
        """The step has really ended. Returns its early end, if it had one."""
        early_end = self._early_end
        if early_end is None or early_end.sent is not sent:
            return None
        self._early_end = None
        return early_end

    def forget(self) -> None:
        """The ranks are lost, and the running step with them."""
        self._early_end = None

    def _switches(self, job: Job) -> bool:
        return self._rotary_switch is not None and job.num_tokens == self._rotary_switch + 1


def _will_end(job: Job) -> bool:
    """Whether the job has ended, or will with its pending token whatever that is."""
    return job.state is JobState.FINISHED or job.num_outputs >= job.params.max_tokens
