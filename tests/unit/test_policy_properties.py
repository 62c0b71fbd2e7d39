"""Properties of every policy over random histories, as the step loop makes them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastserve_backend.job import FinishReason, Job, Place
from fastserve_backend.scheduler.base import BatchLimits, Policy, Scheduled, time_to_next_token
from fastserve_backend.scheduler.gittins import Gittins
from fastserve_backend.scheduler.mlfq import MLFQ
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from fastserve_backend.scheduler.speculative import Speculative
from hypothesis import example, given
from hypothesis import strategies as st
from jobs import make_job, run_iteration
from matrices import random_examples
from policies import POLICIES, TIMES, by_priority, make_policy, select

NUM_JOBS = 40
LONGEST_PROMPT, MOST_OUTPUT = 40, 25
SHORTEST_S, LONGEST_S = 0.5, 3.0  # the longest time between two ends of iterations


PROMOTING = ("mlfq", "skip_join_mlfq", "gittins", "slo")


@dataclass
class Flight:
    batch: list[Scheduled]
    started_s: float
    cancelled: set[int] = field(default_factory=set)


class History:
    """Arrivals, iterations, refusals for want of memory, and cancellations, checked at each step.

    ``num_stages`` batches at most are in flight and end in order. If ``refuses``, some selected
    jobs do not run; then starvation has no bound.
    """

    def __init__(self, seed: int, name: str, num_stages: int, chunk: bool, refuses: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.name, self.num_stages, self.refuses = name, num_stages, refuses
        whole = LONGEST_PROMPT + MOST_OUTPUT
        self.limits = BatchLimits(
            max_seqs=rng.randint(1, 6),
            max_tokens=rng.randint(1, 30) if chunk else rng.randint(whole, 2 * whole),
            prefill_chunk_tokens=rng.randint(1, 30) if chunk else None,
        )
        self.starvation_s = rng.choice([5.0, 30.0])
        self.policy = self.make_policy()
        self.most_known = rng.randint(3, 15)
        self.predicts = rng.random() < 0.8
        self.known: dict[int, Job] = {}
        self.flights: list[Flight] = []
        self.waiting_since: dict[int, float] = {}
        self.now = self.last_event_s = 0.0
        self.num_ended = 0
        self.batches: list[list[Scheduled]] = []  # of all selections

    def make_policy(self) -> Policy:
        return make_policy(
            self.name, self.limits, starvation_s=self.starvation_s, longest=float(LONGEST_PROMPT)
        )

    def make_job(self, number: int, prompt_len: int, max_tokens: int, arrival_s: float) -> Job:
        return make_job(number, prompt_len, max_tokens=max_tokens, arrival_s=arrival_s)

    def run(self) -> None:
        arrivals = iter(range(NUM_JOBS))
        arriving: int | None = next(arrivals)
        while arriving is not None or self.known:
            while arriving is not None and (not self.known or self.rng.random() < 0.5):
                if len(self.known) >= self.most_known:
                    break
                self.arrive(arriving)
                arriving = next(arrivals, None)
            if self.known and self.rng.random() < 0.05:
                self.cancel(self.rng.choice(list(self.known.values())))
            if self.known and self.predicts and self.rng.random() < 0.3:
                self.predict(self.rng.choice(list(self.known.values())))
            while len(self.flights) < self.num_stages and self.schedule():
                pass
            if self.flights:
                self.finish_oldest()
            self.check_known()
        assert self.num_ended == NUM_JOBS
        assert sum(self.policy.level_sizes()) == 0

    # --- Events -------------------------------------------------------------------------------

    def arrive(self, number: int) -> None:
        job = self.make_job(
            number,
            self.rng.randint(1, LONGEST_PROMPT),
            max_tokens=self.rng.randint(1, MOST_OUTPUT),
            arrival_s=self.rng.uniform(self.last_event_s, self.now),  # while an iteration ran
        )
        with self.order_kept():
            self.policy.add(job, job.arrival_s)
            self.known[number] = job
        self.waiting_since[number] = job.arrival_s
        if isinstance(self.policy, SkipJoinMLFQ):
            self.check_level_fits(self.policy, job, highest=0)

    def cancel(self, job: Job) -> None:
        """Cancels a waiting job at once, and another after its iteration."""
        for flight in self.flights:
            if any(other is job for other, _ in flight.batch):
                flight.cancelled.add(job.number)
                return
        self.end(job)

    def predict(self, job: Job) -> None:
        """Predictions may repeat, and may come while the job is in flight."""
        job.predicted_tokens = self.rng.randint(0, 2 * MOST_OUTPUT)
        with self.order_kept(changed=[job]):
            self.policy.on_predicted(job)

    def end(self, job: Job) -> None:
        job.finish_reason = FinishReason.STOP
        with self.order_kept():
            self.policy.remove(job)
            del self.known[job.number], self.waiting_since[job.number]
        self.num_ended += 1

    def schedule(self) -> bool:
        with self.order_kept():
            flying = {job.number for flight in self.flights for job, _ in flight.batch}
            batch = select(self.policy, self.now, flying)
        self.batches.append(batch)
        self.check_batch(batch)
        if self.refuses and self.rng.random() < 0.3:
            refused = [item for item in batch if self.rng.random() < 0.5]
            batch = [item for item in batch if item not in refused]
        if batch:
            self.flights.append(Flight(batch, self.now))
            for job, _ in batch:
                del self.waiting_since[job.number]
        return bool(batch)

    def finish_oldest(self) -> None:
        flight = self.flights.pop(0)
        self.last_event_s = self.now
        self.now += self.rng.choice([SHORTEST_S, 1.0, LONGEST_S])
        for job, num_tokens in flight.batch:
            if job.number not in flight.cancelled:
                run_iteration(job, num_tokens)
            self.waiting_since[job.number] = self.now
        before = {job.number: job.queue_level for job in self.known.values()}
        jobs = [job for job, _ in flight.batch]
        with self.order_kept(changed=jobs):
            self.policy.on_iteration_finished(flight.batch, self.now)
        for job in self.known.values():
            if job in jobs and job.queue_level != before[job.number]:
                if isinstance(self.policy, SkipJoinMLFQ):
                    self.check_level_fits(self.policy, job, before[job.number] + 1)
                elif self.name != "speculative":
                    assert job.queue_level == before[job.number] + 1
            elif job not in jobs:
                assert job.queue_level == before[job.number]
        for job in jobs:
            if job.number in flight.cancelled or len(job.output_ids) == job.params.max_tokens:
                self.end(job)

    # --- Properties ---------------------------------------------------------------------------

    def by_priority(self) -> list[Job]:
        return by_priority(self.policy, self.known.values())

    def promoted(self) -> list[Job]:
        if not isinstance(self.policy, MLFQ):
            return []
        return [job for job in self.known.values() if self.policy.has_turn(job)]

    def check_batch(self, batch: list[Scheduled]) -> None:
        limits = self.limits
        flying = {job.number for flight in self.flights for job, _ in flight.batch}
        waiting = [job for job in self.by_priority() if job.number not in flying]
        numbers = [job.number for job, _ in batch]
        # The most urgent waiting jobs in order, none twice, none that is in flight.
        assert [job.number for job in waiting if job.number in numbers] == numbers
        assert numbers[:1] == [job.number for job in waiting[:1]]
        assert len(batch) <= limits.max_seqs
        assert sum(num_tokens for _, num_tokens in batch) <= limits.max_tokens
        prefills = [item for item in batch if item.job.num_uncomputed > 1]
        for job, num_tokens in batch:
            assert 1 <= num_tokens <= job.num_uncomputed
            if limits.prefill_chunk_tokens is None:
                assert num_tokens == job.num_uncomputed
        if limits.prefill_chunk_tokens is not None:
            assert sum(num_tokens for _, num_tokens in prefills) <= limits.prefill_chunk_tokens
            # Only the last prefill is cut short.
            assert all(item.num_tokens == item.job.num_uncomputed for item in prefills[:-1])
        self.check_work_conserved(batch, waiting)

    def check_work_conserved(self, batch: list[Scheduled], waiting: list[Job]) -> None:
        """A job is left out only if it does not fit beside more urgent jobs, or if its prefill
        comes after one that did not fit.

        ``speculative`` compares jobs with a prediction with the first job of its queues. If that is
        a prompt that waits, the next one in the queues may come before a job with a prediction.
        """
        tokens_left, chunk_left = self.limits.max_tokens, self.limits.prefill_chunk_tokens
        slots_left, prompts_wait = self.limits.max_seqs, False
        taken = {job.number: num_tokens for job, num_tokens in batch}
        for index, job in enumerate(waiting):
            if job.number in taken:
                tokens_left -= taken[job.number]
                slots_left -= 1
                if chunk_left is not None and job.num_uncomputed > 1:
                    chunk_left -= taken[job.number]
                continue
            is_prefill = job.num_uncomputed > 1
            needed = 1 if chunk_left is not None else job.num_uncomputed
            no_room = slots_left == 0 or needed > tokens_left
            no_chunk = is_prefill and chunk_left == 0
            waits = prompts_wait and (is_prefill or job.place is Place.NOWHERE)
            queue_came_first = (
                self.name == "speculative"
                and prompts_wait
                and job.predicted_tokens is not None
                and any(
                    behind.number in taken and behind.predicted_tokens is None
                    for behind in waiting[index + 1 :]
                )
            )
            assert no_room or no_chunk or waits or queue_came_first
            prompts_wait = True

    def check_level_fits(self, policy: SkipJoinMLFQ, job: Job, highest: int) -> None:
        """The queue is the first, from ``highest`` down, whose quantum covers the next token."""
        needed_s = time_to_next_token(job, TIMES)
        level, last = job.queue_level, len(policy.quanta_s) - 1
        assert policy.quanta_s[level] >= needed_s or level == last
        assert level == highest or (level > highest and policy.quanta_s[level - 1] < needed_s)

    @contextmanager
    def order_kept(self, changed: list[Job] | None = None) -> Iterator[None]:
        """Jobs of one queue stay in order, and new ones join at its end. Only a promoted job comes
        first, until its turn is over. A policy without queues moves only the ``changed`` jobs, and
        so does ``speculative`` with predictions; its other jobs are in the queues of an MLFQ."""
        before = self.by_priority()
        levels = {job.number: job.queue_level for job in before}
        promoted = self.promoted()
        yield
        promoted += self.promoted()
        after = self.by_priority()
        if isinstance(self.policy, MLFQ):
            assert [job.queue_level for job in after] == sorted(job.queue_level for job in after)
            for level in range(len(self.policy.quanta_s)):
                queue = [job for job in after if job.queue_level == level]
                stayed = [job for job in before if job in queue and levels[job.number] == level]
                queue, stayed = (
                    [job for job in jobs if job not in promoted] for jobs in (queue, stayed)
                )
                assert queue[: len(stayed)] == stayed
        elif not isinstance(self.policy, Gittins):  # which moves any job when it learns or promotes
            moved = changed or []
            if isinstance(self.policy, Speculative):
                before = [job for job in before if job.predicted_tokens is not None]
            assert [job for job in after if job in before and job not in moved] == [
                job for job in before if job in after and job not in moved
            ]

    def check_known(self) -> None:
        by_priority = self.by_priority()
        assert sum(self.policy.level_sizes()) == len(self.known)
        jobs = list(self.known.values())
        if self.name == "fcfs":
            expected = sorted(jobs, key=lambda job: job.number)
        elif self.name == "fixed_priority":
            expected = sorted(jobs, key=lambda job: (len(job.prompt_ids), job.number))
        elif self.name == "srpt":
            expected = sorted(jobs, key=lambda job: (seconds_left(job), job.number))
        else:
            if self.name in PROMOTING:  # for speculative see test_speculative.py
                self.check_starvation()
            expected = sorted(jobs, key=lambda job: by_priority.index(job))
            for level, size in enumerate(self.policy.level_sizes()):
                assert size == sum(job.queue_level == level for job in jobs)
        assert by_priority == expected

    def check_starvation(self) -> None:
        """No job waits much longer than the threshold.

        An event (the end of an iteration, and then a selection) comes at least every
        ``LONGEST_S``. A job is promoted at the first event at which it has waited for the
        threshold, or one event later: an arrival during an iteration stands in the list of waiting
        jobs behind those that ran in it, whose waiting began later by up to one event. Then it
        comes before all others, after at most ``most_known - 1`` others that were promoted before
        it, ``num_turns`` at a time. Each of those is gone when its turn has lasted its time and it
        has a token, for which all that have a turn share the iterations.
        """
        if self.refuses:
            return
        chunk_tokens = min(
            self.limits.prefill_chunk_tokens or LONGEST_PROMPT, self.limits.max_tokens
        )
        iterations = max(2, -(-LONGEST_PROMPT // chunk_tokens))
        iterations = self.num_stages * max(iterations, math.ceil(self.starvation_s / SHORTEST_S))
        passed_by = (self.most_known - 1) * iterations
        bound_s = self.starvation_s + (2 + passed_by + 1) * LONGEST_S
        bound_s += 10 * self.most_known * LONGEST_PROMPT  # first tokens get a tenth of the time
        assert all(self.now - since <= bound_s for since in self.waiting_since.values())


def seconds_left(job: Job) -> float:
    """Prefill 1 s a token, decode 1 s."""
    return job.num_uncomputed + job.params.max_tokens - len(job.output_ids) - 1


@example(seed=110019985, name="speculative", num_stages=1, chunk=True, refuses=True)
@random_examples(150)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(POLICIES),
    num_stages=st.integers(1, 3),
    chunk=st.booleans(),
    refuses=st.booleans(),
)
def test_random_histories(
    seed: int, name: str, num_stages: int, chunk: bool, refuses: bool
) -> None:
    History(seed, name, num_stages, chunk, refuses).run()
