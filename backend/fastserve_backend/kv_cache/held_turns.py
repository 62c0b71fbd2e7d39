"""Held turns in one place, and which of them gives way to others first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from fastserve_backend.job import Job
from fastserve_backend.kv_cache.session_history import SessionKey


@dataclass(slots=True)
class HeldTurn:
    """An ended job whose KV is held."""

    key: SessionKey
    job: Job
    num_tokens: int
    """Whose KV is held."""
    since_s: float


class HeldTurns:
    """Turns by the number of their job, those that came here first at the front.

    Of the tenant that has the most tokens here, the turn at the front gives way first. So a tenant
    with many or long sessions cannot drive out those of others.
    """

    def __init__(self) -> None:
        self._turns: dict[str, OrderedDict[int, HeldTurn]] = {}  # by tenant
        self._num_tokens: Counter[str] = Counter()
        self._counted: dict[int, tuple[str, int]] = {}  # by job: tenant and tokens

    def __contains__(self, number: object) -> bool:
        return number in self._counted

    def add(self, turn: HeldTurn) -> None:
        """The turn comes here, with the tokens that it has now."""
        tenant, number = turn.key.tenant, turn.job.number
        self._turns.setdefault(tenant, OrderedDict())[number] = turn
        self._counted[number] = tenant, turn.num_tokens
        self._num_tokens[tenant] += turn.num_tokens

    def get(self, number: int) -> HeldTurn:
        """The job's turn, which must be here."""
        return self._turns[self._counted[number][0]][number]

    def pop(self, number: int) -> HeldTurn | None:
        """Remove and return the job's turn. None: it is not here."""
        if number not in self._counted:
            return None
        tenant, num_tokens = self._counted.pop(number)
        turn = self._turns[tenant].pop(number)
        self._num_tokens[tenant] -= num_tokens
        if not self._turns[tenant]:
            del self._turns[tenant], self._num_tokens[tenant]
        return turn

    def leaving_order(self) -> Iterator[HeldTurn]:
        """All turns, those that give way first at the front. The caller may remove the turns that
        it has got, and add none."""
        waiting = {tenant: iter(list(turns.values())) for tenant, turns in self._turns.items()}
        left = Counter(self._num_tokens)
        while waiting:
            tenant = max(waiting, key=left.__getitem__)
            turn = next(waiting[tenant], None)
            if turn is None:
                del waiting[tenant]
                continue
            left[tenant] -= self._counted[turn.job.number][1]
            yield turn
