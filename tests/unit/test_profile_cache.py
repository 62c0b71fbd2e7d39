"""Profiles of earlier starts: used, or measured again where they may be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fastserve_backend.errors import ConfigError
from fastserve_backend.profile.cache import (
    better,
    cache_path,
    cache_path_if_any,
    load_or_measure,
    mark_contradicted,
)
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.loads import Limits
from fastserve_backend.profile.measure import ReadyRanks
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.simulation.simulated_executor import SimulatedExecutor
from fastserve_backend.system.clock import VirtualClock
from no_home import leave_without_home
from profiles import LIMITS, LINK, identity, known_profile


class Machine:
    """A modelled machine, which is busy or not."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._executor = SimulatedExecutor(known_profile(), self.clock, LINK)
        self.is_busy = False
        self.num_measurements = 0

    def load(self, path: Path | None, limits: Limits = LIMITS, link: Link = LINK) -> LatencyProfile:
        """A start. It counts as a measurement if it takes time."""
        began_s = self.clock.now()
        profile = load_or_measure(
            path,
            ReadyRanks(identity(), limits, link, self._executor, self.clock.now, self._waited_s),
        )
        self.num_measurements += self.clock.now() > began_s
        return profile

    def _waited_s(self, passed_s: float) -> float:
        """As of ``ReadyRanks``: a third of the time, if the machine is busy."""
        return passed_s / 3 if self.is_busy else 0.0


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.json"


def test_the_second_start_reads_what_the_first_has_measured(machine: Machine, path: Path) -> None:
    first = machine.load(path)
    assert machine.load(path) == first
    assert machine.num_measurements == 1


def test_a_cached_profile_gets_the_link_that_there_was_no_host_memory_to_measure(
    machine: Machine, path: Path
) -> None:
    without = machine.load(path, link=Link(0.0, 0.0))
    with_link = machine.load(path)
    assert with_link == replace(without, link=LINK) == LatencyProfile.load(path)
    assert machine.load(path, link=Link(0.0, 0.0)) == with_link


def test_a_profile_of_smaller_batches_is_measured_again(machine: Machine, path: Path) -> None:
    def measures(max_seqs: int, max_batched_tokens: int = 512) -> bool:
        num_before = machine.num_measurements
        limits = replace(LIMITS, max_seqs=max_seqs, max_batched_tokens=max_batched_tokens)
        assert machine.load(path, limits) == LatencyProfile.load(path)
        return machine.num_measurements > num_before

    assert measures(8)
    assert not measures(4)
    assert measures(16)
    assert not measures(8)
    assert measures(8, max_batched_tokens=2048)  # its prefills are longer
    assert not measures(8)


@pytest.mark.parametrize("content", ["damaged", "foreign"])
def test_a_damaged_or_foreign_cache_is_measured_again(
    machine: Machine, path: Path, content: str
) -> None:
    if content == "foreign":
        replace(known_profile(), identity=identity(hardware="another")).save(path)
    else:
        path.write_text("{")
    profile = machine.load(path)
    assert machine.num_measurements == 1
    assert LatencyProfile.load(path) == profile


def test_a_cache_that_cannot_be_written_only_costs_the_next_start(
    machine: Machine, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert machine.load(blocked / "p.json").decode_s(100) > 0


def test_a_user_without_a_home_has_it_measured_at_each_start(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave_without_home(monkeypatch)
    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME to an absolute path"):
        cache_path(identity())
    path = cache_path_if_any(identity())
    assert path is None
    assert "anew at each start: no cache directory: got HOME None" in caplog.text
    assert machine.load(path).decode_s(100) > 0


# --- Busy machines ----------------------------------------------------------------------------


def test_a_profile_of_a_busy_machine_is_measured_again_until_it_is_quiet(
    machine: Machine, path: Path
) -> None:
    machine.is_busy = True
    assert machine.load(path).busy
    assert LatencyProfile.load(path).busy
    machine.load(path)
    assert machine.num_measurements == 2
    machine.is_busy = False
    assert not machine.load(path).busy
    assert machine.num_measurements == 3
    machine.load(path)
    assert machine.num_measurements == 3


def slow(factor: float, *, busy: bool) -> LatencyProfile:
    return replace(known_profile(), base_s=factor * known_profile().base_s, busy=busy)


def test_of_two_busy_profiles_the_faster_one_stays() -> None:
    cached = slow(2.0, busy=True)
    for measured, expected in (
        (slow(3.0, busy=True), cached),
        (slow(1.5, busy=True), slow(1.5, busy=True)),
        (slow(3.0, busy=False), slow(3.0, busy=False)),
        (slow(1.5, busy=False), slow(1.5, busy=False)),
    ):
        assert better(cached, measured) == expected


def test_a_contradicted_profile_is_measured_again(machine: Machine, path: Path) -> None:
    wrong = machine.load(path)
    mark_contradicted(path, wrong)
    assert LatencyProfile.load(path) == replace(wrong, busy=True)
    assert not machine.load(path).busy
    assert machine.num_measurements == 2


def test_only_the_file_of_the_contradicted_profile_changes(path: Path) -> None:
    mark_contradicted(None, known_profile())
    mark_contradicted(path, known_profile())
    assert not path.exists()
    newer = slow(0.5, busy=False)
    newer.save(path)
    mark_contradicted(path, known_profile())
    assert LatencyProfile.load(path) == newer


def test_files_from_before_profiles_told_of_load_are_used(machine: Machine, path: Path) -> None:
    machine.load(path)
    values = json.loads(path.read_text())
    assert values.pop("busy") is False
    path.write_text(json.dumps(values))
    assert not machine.load(path).busy
    assert machine.num_measurements == 1
