"""The bound of a batch with jobs of several tenants."""

from __future__ import annotations

from itertools import accumulate

from fastserve_backend.scheduler.tenant_speed import TenantSpeed
from hypothesis import given
from hypothesis import strategies as st
from matrices import random_examples

MAX_SEQS = 16
TENANTS = st.lists(
    st.tuples(st.integers(1, 2 * MAX_SEQS), st.floats(0.1, 10.0)), min_size=2, max_size=8
)


def seats(per_job_s: float, *tenants: tuple[int, float]) -> int:
    """Where a batch takes 1 s, and ``per_job_s`` for each job but the first."""
    speed = TenantSpeed(MAX_SEQS, lambda number: 1.0 + per_job_s * (number - 1))
    return speed.most_seats(tenants)


def test_a_single_job_of_another_tenant_is_slowed_down_by_its_share_at_most() -> None:
    assert seats(1.0, (100, 1 / 2), (1, 1 / 2)) == 2
    assert seats(0.25, (100, 1 / 2), (1, 1 / 2)) == 5
    assert seats(0.25, (100, 1 / 4), (1, 3 / 4)) == 2
    assert seats(0.25, (100, 3 / 4), (1, 1 / 4)) == 13


def test_a_batch_that_costs_the_same_however_large_it_is_has_no_bound() -> None:
    assert seats(0.01, (100, 1 / 2), (1, 1 / 2)) == MAX_SEQS


def test_tenants_with_jobs_for_all_seats_have_no_bound() -> None:
    assert seats(1.0, (MAX_SEQS, 1 / 2), (100, 1 / 2)) == MAX_SEQS


@random_examples(300)
@given(
    steps_s=st.lists(st.floats(0.0, 10.0), min_size=MAX_SEQS, max_size=MAX_SEQS), tenants=TENANTS
)
def test_the_bound_is_the_largest_that_leaves_each_its_share(
    steps_s: list[float], tenants: list[tuple[int, float]]
) -> None:
    decodes_s = [0.0, *accumulate([0.1 + steps_s[0], *steps_s[1:]])]
    speed = TenantSpeed(MAX_SEQS, decodes_s.__getitem__)
    total = sum(weight for _, weight in tenants)
    shares = [(number, weight / total) for number, weight in tenants]
    most = speed.most_seats(shares)

    def is_fair(num_seats: int) -> bool:
        return all(
            decodes_s[num_seats] <= decodes_s[min(number, MAX_SEQS)] / share
            for number, share in shares
        )

    assert 1 <= most <= MAX_SEQS
    assert is_fair(most)
    assert most == MAX_SEQS or not is_fair(most + 1)
    if not speed.needs_bound(max(share for _, share in shares)):
        assert most == MAX_SEQS
