"""What earlier turns say about a session: how long it pauses, and how much it was served.

A session is a conversation that its client names (``ServiceLevel.session_id``), such as that of an
agent, which pauses while its tools run. Its turns are jobs. How long a paused session's KV is worth
keeping follows from measured pauses, as in Continuum (arXiv 2511.02230). What a session was served
so far is what Autellix (arXiv 2502.13965) schedules by.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from fastserve_backend.job import Job

# Sessions that are remembered; the one without a turn for the longest time is forgotten first.
_MOST_SESSIONS = 10_000
# So many of the latest pauses count.
_MOST_PAUSES = 500
# Until there are so many, pauses of the prior length fill up the rest.
_PRIOR_PAUSES = 20
_PRIOR_PAUSE_S = 60.0
# KV is held until this share of the pauses has ended. Held KV costs no job anything, so a late
# return is worth waiting for.
_QUANTILE = 0.95
# A tool that hangs may end at any time, and a short pause may be longer next time.
_SHORTEST_TTL_S, _LONGEST_TTL_S = 5.0, 600.0


class SessionKey(NamedTuple):
    """Names a session. The same id of another tenant, or with another salt, is another session."""

    tenant: str
    session_id: str
    cache_salt: str

    @classmethod
    def of(cls, job: Job) -> SessionKey | None:
        """None: the job belongs to no session."""
        service = job.service
        if not service.session_id:
            return None
        return cls(service.tenant, service.session_id, service.cache_salt)


class TurnTimes(Protocol):
    """Seconds that a turn's parts take alone."""

    def prefill_s(self, num_tokens: int) -> float: ...

    def decode_s(self, context_tokens: int) -> float: ...


@dataclass(slots=True)
class _Session:
    paused_since_s: float | None = None  # None: a turn runs
    served_s: float = 0.0  # seconds that its ended turns would have taken alone
    output_tokens: int = 0  # of its ended turns


class SessionHistory:
    """Remembers a bounded number of sessions. It outlives the ranks. Used by one thread.

    Args:
        ttl_s: seconds for which a paused session's KV is held; auto: from measured pauses.
        times: what a turn would have taken alone.
        inherits_age: whether turns learn what their sessions were served (``Job.session_s``).
    """

    def __init__(
        self, ttl_s: float | Literal["auto"], times: TurnTimes, *, inherits_age: bool
    ) -> None:
        self.ttl_s = _PRIOR_PAUSE_S if ttl_s == "auto" else ttl_s
        """Seconds for which a paused session's KV is held."""
        self._learns_ttl = ttl_s == "auto"
        self._times = times
        self._inherits_age = inherits_age
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._pauses: deque[float] = deque(maxlen=_MOST_PAUSES)

    def on_arrival(self, job: Job, now: float) -> None:
        """A job arrived; if it is a turn, its session's pause is over."""
        key = SessionKey.of(job)
        if key is None:
            return
        session = self._remember(key)
        if session.paused_since_s is not None:
            self._pauses.append(now - session.paused_since_s)
            session.paused_since_s = None
            if self._learns_ttl:
                self._learn_ttl()
        if self._inherits_age:
            job.session_s, job.session_tokens = session.served_s, session.output_tokens

    def on_end(self, job: Job, now: float) -> None:
        """A job ended; if it was a turn, its session pauses."""
        key = SessionKey.of(job)
        if key is None:
            return
        session = self._remember(key)
        session.paused_since_s = now
        if job.first_scheduled_s is not None:
            num_prefilled = len(job.prompt_ids) - job.num_cached_tokens
            num_outputs = len(job.output_ids)
            session.served_s += self._times.prefill_s(max(1, num_prefilled))
            session.served_s += num_outputs * self._times.decode_s(len(job.prompt_ids))
            session.output_tokens += num_outputs

    def _remember(self, key: SessionKey) -> _Session:
        session = self._sessions.setdefault(key, _Session())
        self._sessions.move_to_end(key)
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def _learn_ttl(self) -> None:
        num_prior = max(0, _PRIOR_PAUSES - len(self._pauses))
        pauses = sorted([*self._pauses, *num_prior * [_PRIOR_PAUSE_S]])
        quantile_s = pauses[math.ceil(_QUANTILE * len(pauses)) - 1]
        self.ttl_s = min(_LONGEST_TTL_S, max(_SHORTEST_TTL_S, quantile_s))
