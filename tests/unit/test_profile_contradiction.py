"""A profile is wrong if iterations are far shorter for a time, not if they are longer."""

from __future__ import annotations

import pytest
from fastserve_backend.profile.contradiction import Contradiction

LONG = 2000  # iterations


@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_a_profile_of_times_that_are_too_long_is_noticed_once(ratio: float) -> None:
    contradiction = Contradiction()
    assert sum(contradiction.observe(ratio) for _ in range(LONG)) == 1


@pytest.mark.parametrize("ratio", [0.8, 1.0, 1.3, 5.0, 30.0])
def test_drift_and_load_do_not_contradict_a_profile(ratio: float) -> None:
    contradiction = Contradiction()
    assert not any(contradiction.observe(ratio) for _ in range(LONG))


def test_a_fast_spell_does_not_contradict_a_profile() -> None:
    contradiction = Contradiction()
    for _ in range(10):
        assert not any(contradiction.observe(0.4) for _ in range(200))
        assert not contradiction.observe(1.0)
