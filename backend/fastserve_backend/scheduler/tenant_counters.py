"""What each tenant with jobs has had, and which of them are held back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from fastserve_backend.job import PLACES, Job, Place

# Of the tolerance: so far below the threshold a tenant is released.
_RELEASE_SHARE = 0.5


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant with jobs."""

    name: str
    weight: float
    rank: int
    """Ascends in order of joining."""
    counter: float
    """Service over weight, in seconds."""
    is_held: bool = False
    """Whether its jobs come behind those of all tenants that are not held back."""
    jobs_at: tuple[dict[int, Job], ...] = field(default_factory=lambda: tuple({} for _ in PLACES))
    """By job number, at each ``Place``."""

    @property
    def num_jobs(self) -> int:
        return sum(map(len, self.jobs_at))


_Heap = list[tuple[float, int, Tenant]]


def _update_first(heap: _Heap, present: Mapping[str, Tenant]) -> None:
    """Bring the first entry up to date, and drop those of tenants that have left."""
    while heap:
        counter, rank, tenant = heap[0]
        if present.get(tenant.name) is not tenant:
            heappop(heap)
        elif counter < tenant.counter:
            heapreplace(heap, (tenant.counter, rank, tenant))
        else:
            return


class TenantCounters:
    """Counters of service over weight, the clock of a fair machine, and who is held back.

    The **clock** is what each tenant of weight 1 would have had, if the machine were divided by
    weights at each moment: it advances by service over the weights of all tenants with jobs.

    A tenant that has had nothing for long has a **credit** of one tolerance: its counter is never
    further behind the clock, unless its jobs wait. A tenant is **held back** once its counter
    exceeds a threshold: the clock, or the smallest counter and a tolerance if that is less. The
    smallest counter is never held back. It is released half a tolerance below the threshold, so
    that tenants do not take turns at every token.

    What a tenant gets while it is held back is what others leave. It owes a tolerance for that at
    most.

    A charge costs O(1), and an answer O(log tenants), amortized.
    """

    def __init__(self, weights: Mapping[str, float], tolerance_s: float = 0.0) -> None:
        """
        Args:
            weights: by tenant; all others have the weight 1.
        """
        self.tolerance_s = tolerance_s
        self.of: dict[str, Tenant] = {}
        """Tenants with jobs, by name."""
        self.open: dict[str, Tenant] = {}
        """Those that are not held back."""
        self.num_open_at = [0] * len(PLACES)
        """Their jobs at each place."""
        self.num_held_at = [0] * len(PLACES)
        """Jobs at each place of tenants that are held back."""
        self.total_weight = 0.0
        self._weights = weights
        self._clock_s = 0.0
        self._num_joined = 0
        # Heaps of (counter, rank, tenant). Counters only grow, so an entry is brought up to date
        # when it comes first.
        self._all: _Heap = []
        self._held: _Heap = []
        # Counters of tenants without jobs, where those are more than they would start with.
        self._remembered: dict[str, float] = {}
        self._forgot_up_to_s = 0.0

    @property
    def num_held(self) -> int:
        return len(self.of) - len(self.open)

    def num_at(self, place: Place) -> int:
        """Jobs of all tenants at the place."""
        return self.num_open_at[place] + self.num_held_at[place]

    def join(self, name: str) -> Tenant:
        """A tenant gets its first job."""
        if len(self.of) == 1:
            # A tenant alone has the whole machine, so it keeps no credit for when others come.
            (alone,) = self.of.values()
            alone.counter = max(alone.counter, self._clock_s)
        self._num_joined += 1
        counter = max(self._remembered.pop(name, self._least_s), self._least_s)
        tenant = Tenant(name, self.weight(name), self._num_joined, counter)
        self.of[name] = self.open[name] = tenant
        self.total_weight += tenant.weight
        heappush(self._all, (counter, tenant.rank, tenant))
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A tenant has no job any more."""
        del self.of[tenant.name]
        self.open.pop(tenant.name, None)
        self.total_weight -= tenant.weight
        if not self.of:
            self.total_weight = self._clock_s = self._forgot_up_to_s = 0.0  # no rounding errors
            self._all.clear()
            self._held.clear()
            self._remembered.clear()
            return
        if tenant.counter > self._least_s:
            self._remembered[tenant.name] = tenant.counter
        self._release()

    def add_job(self, tenant: Tenant, job: Job, place: Place) -> None:
        tenant.jobs_at[place][job.number] = job
        (self.num_held_at if tenant.is_held else self.num_open_at)[place] += 1

    def remove_job(self, tenant: Tenant, job: Job, place: Place) -> None:
        del tenant.jobs_at[place][job.number]
        (self.num_held_at if tenant.is_held else self.num_open_at)[place] -= 1

    def weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def charge(self, service_s: Mapping[str, float], all_run: Collection[str] = ()) -> None:
        """Tenants with jobs have used the machine.

        Args:
            service_s: by tenant.
            all_run: tenants whose jobs all ran. They save nothing up meanwhile beyond a credit.
        """
        advance_s = sum(service_s.values()) / self.total_weight
        self._clock_s += advance_s
        for name, seconds in service_s.items():
            tenant = self.of[name]
            before = tenant.counter
            tenant.counter += seconds / tenant.weight
            if tenant.is_held:
                most = max(before, self._clock_s + self.tolerance_s)
                tenant.counter = min(tenant.counter, most)
            if name in all_run:
                least = min(self._least_s, before + advance_s)
                tenant.counter = max(tenant.counter, least)
        threshold_s = self._threshold_s()
        for name in service_s:
            tenant = self.of[name]
            if tenant.counter > threshold_s and not tenant.is_held:
                self._set_held(tenant, True)
                heappush(self._held, (tenant.counter, tenant.rank, tenant))
        self._release()
        if self._least_s > self._forgot_up_to_s + self.tolerance_s / 4:
            self._forgot_up_to_s = self._least_s
            remembered = self._remembered.items()
            self._remembered = {one: had_s for one, had_s in remembered if had_s > self._least_s}

    def charge_absent(self, name: str, service_s: float) -> None:
        """A tenant without jobs has used the machine. Others must have jobs."""
        counter = max(self._remembered.get(name, self._least_s), self._least_s)
        self._remembered[name] = counter + service_s / self.weight(name)

    @property
    def _least_s(self) -> float:
        """The counter of a tenant with a full credit."""
        return self._clock_s - self.tolerance_s

    def _threshold_s(self) -> float:
        least_s = self._smallest_s()
        return max(least_s, min(self._clock_s, least_s + self.tolerance_s))

    def _smallest_s(self) -> float:
        """The smallest counter. There must be a tenant."""
        _update_first(self._all, self.of)
        return self._all[0][0]

    def _release(self) -> None:
        up_to_s = max(self._smallest_s(), self._threshold_s() - _RELEASE_SHARE * self.tolerance_s)
        while True:
            _update_first(self._held, self.of)
            if not self._held or self._held[0][0] > up_to_s:
                return
            _, _, tenant = heappop(self._held)
            self._set_held(tenant, False)

    def _set_held(self, tenant: Tenant, is_held: bool) -> None:
        tenant.is_held = is_held
        if is_held:
            del self.open[tenant.name]
        else:
            self.open[tenant.name] = tenant
        now_at = self.num_held_at if is_held else self.num_open_at
        before_at = self.num_open_at if is_held else self.num_held_at
        for place, jobs in enumerate(tenant.jobs_at):
            now_at[place] += len(jobs)
            before_at[place] -= len(jobs)
