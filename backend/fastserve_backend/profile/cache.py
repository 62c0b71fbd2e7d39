"""Latency profiles of earlier starts, in the user's cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from fastserve_backend.errors import ConfigError
from fastserve_backend.profile.latency import Identity, LatencyProfile
from fastserve_backend.profile.measure import ReadyRanks, measure_briefly
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.system.cache_directory import cache_directory

_ANEW = "the latency profile is measured anew at each start: %s"
# Two profiles are compared by the time of this batch: so many jobs with so many tokens each.
_COMPARED_JOBS, _COMPARED_CONTEXT = 8, 512
_log = logging.getLogger(__name__)


def profiles_directory() -> Path:
    """Directory of profiles in the user's cache; it need not exist.

    Raises:
        ConfigError: there is no cache.
    """
    return cache_directory("profiles")


def cache_path(identity: Identity) -> Path:
    """File that the engine reads at its start, if it exists.

    Raises:
        ConfigError: there is no cache.
    """
    return profiles_directory() / f"{identity.key}.json"


def cache_path_if_any(identity: Identity) -> Path | None:
    """As ``cache_path``, but warns and returns None if there is no cache."""
    try:
        return cache_path(identity)
    except ConfigError as error:
        _log.warning(_ANEW, error)
        return None


def load_or_measure(path: Path | None, ranks: ReadyRanks) -> LatencyProfile:
    """The profile in ``path``, or a brief measurement, which is saved there for the next start.

    A profile in ``path`` is not used if its batches or prefills were smaller than the ranks' limits
    allow. If it is from a busy machine, it is measured again: see ``better``. None: measure, and
    save nothing.
    """
    cached = None if path is None else _load_fitting(path, ranks)
    if cached is not None and not cached.busy:
        return cached
    identity = ranks.identity
    why = "" if cached is None else " again: a busy machine showed in the one of an earlier start"
    _log.info("measuring the latency profile of %s on %s%s", identity.model, identity.hardware, why)
    measured = measure_briefly(ranks)
    profile = measured if cached is None else better(cached, measured)
    if profile is not cached:
        _try_to_save(profile, path, _ANEW)
    return profile


def better(cached: LatencyProfile, measured: LatencyProfile) -> LatencyProfile:
    """Which of two profiles of the same ranks to use, if the ``cached`` one is from a busy machine.

    That is the measured one, unless the machine was busy again and it is the slower of the two.
    Other processes only make iterations longer, so the faster profile is nearer to the truth.
    """
    if measured.busy and _speed(cached) > _speed(measured):
        return cached
    return measured


def mark_contradicted(path: Path | None, profile: LatencyProfile) -> None:
    """Have the next start measure again, because this profile's times turned out too long.

    Another process may have written ``path`` meanwhile, and then nothing is done.
    """
    try:
        if path is None or LatencyProfile.load(path) != profile:
            return
    except ConfigError:
        return
    _try_to_save(replace(profile, busy=True), path, "the latency profile stays as it was: %s")


def _load_fitting(path: Path, ranks: ReadyRanks) -> LatencyProfile | None:
    """The profile in ``path``, if it is one of these ranks and covers all that they may run."""
    if not path.exists():
        return None
    try:
        profile = LatencyProfile.load(path)
    except ConfigError as error:
        _log.warning("%s", error)
        return None
    limits = ranks.limits
    covers = (
        profile.max_seqs >= limits.max_seqs
        and profile.max_prefill_tokens >= limits.max_prefill_tokens
    )
    if profile.identity.key != ranks.identity.key or not covers:
        return None
    return _with_link(profile, ranks.link, path)


def _with_link(profile: LatencyProfile, link: Link, path: Path) -> LatencyProfile:
    """Add the link to a profile of an earlier start that had no host memory to measure it."""
    if profile.link.block_out_s or not link.block_out_s:
        return profile
    profile = replace(profile, link=link)
    _try_to_save(profile, path, "the latency profile keeps no speed of the link: %s")
    return profile


def _speed(profile: LatencyProfile) -> float:
    """Batches a second of a size that every server runs."""
    return 1.0 / profile.decodes_s(_COMPARED_JOBS, _COMPARED_CONTEXT)


def _try_to_save(profile: LatencyProfile, path: Path | None, warning: str) -> None:
    if path is None:
        return
    try:
        profile.save(path)
    except OSError as error:
        _log.warning(warning, error)
