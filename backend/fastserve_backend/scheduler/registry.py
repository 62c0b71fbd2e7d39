"""Policies by name: those that come with FastServe, and those that installed packages register.

A policy is a class with ``from_config`` (see ``PolicyClass``) in a file of its own, and a line in
``BUILT_IN_POLICIES``. A package registers one as an entry point of the group
``fastserve.policies``; docs/adding_a_policy.md shows how.

Nothing here imports a policy before somebody asks for it, so the configuration may read the names.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from fastserve_backend.errors import ConfigError

if TYPE_CHECKING:
    from fastserve_backend.scheduler.base import Policy
    from fastserve_backend.scheduler.policy_context import PolicyContext

ENTRY_POINT_GROUP = "fastserve.policies"


class PolicyClass(Protocol):
    """What a name stands for."""

    def from_config(self, context: PolicyContext) -> Policy:
        """The class builds a policy. Raises ConfigError: the configuration does not suit it."""


class BuiltInPolicy(NamedTuple):
    """Where a policy of FastServe is, and what it does."""

    location: str
    """``module:class`` in the package ``scheduler``."""
    summary: str


BUILT_IN_POLICIES = {
    "gittins": BuiltInPolicy(
        "gittins:Gittins", "Shortest expected remaining time, by the lengths of jobs that ended."
    ),
    "slo": BuiltInPolicy(
        "slo:SLO", "Jobs that need a token now to meet their objectives; else as gittins."
    ),
    "skip_join_mlfq": BuiltInPolicy(
        "skip_join_mlfq:SkipJoinMLFQ", "FastServe: a job joins the queue that its prefill fits."
    ),
    "speculative": BuiltInPolicy(
        "speculative:Speculative", "ALISE: shortest predicted remaining time, with aging."
    ),
    "mlfq": BuiltInPolicy("mlfq:MLFQ", "Multi-level feedback queue that all jobs join at the top."),
    "fixed_priority": BuiltInPolicy("fixed_priority:FixedPriority", "Shortest prompt first."),
    "srpt": BuiltInPolicy("srpt:SRPT", "Oracle: shortest remaining time first, by max_tokens."),
    "sarathi_edf": BuiltInPolicy("sarathi_edf:SarathiEDF", "Earliest deadline of a token first."),
    "uniboost": BuiltInPolicy("uniboost:UniBoost", "Arrival order; short jobs have a head start."),
    "fcfs": BuiltInPolicy("fcfs:FCFS", "First come, first served, without preemption."),
}


def known_policies() -> list[str]:
    """All names that may be chosen, the built-in ones first."""
    return list(dict.fromkeys([*BUILT_IN_POLICIES, *sorted(_registered())]))


def is_known_policy(name: str) -> bool:
    return name in BUILT_IN_POLICIES or name in _registered()


def load_policy(name: str) -> PolicyClass:
    """The policy's class, imported now.

    Raises:
        ConfigError: nobody or more than one package registers the name, or the class cannot be
            imported or has no ``from_config``.
    """
    registered = _registered().get(name, [])
    if name in BUILT_IN_POLICIES:
        if registered:
            raise ConfigError(
                f"{_given(name)}; {_described(registered)} registers the name of a built-in "
                "policy; rename it or uninstall the package"
            )
        location = f"{__package__}.{BUILT_IN_POLICIES[name].location}"
        return cast(PolicyClass, EntryPoint(name, location, ENTRY_POINT_GROUP).load())
    if not registered:
        raise ConfigError(f"{_given(name)}; must be one of {', '.join(known_policies())}")
    if len(registered) > 1:
        raise ConfigError(
            f"{_given(name)}; {_described(registered)} all register it; uninstall all but one"
        )
    try:
        policy_class = registered[0].load()
    except Exception as error:  # whatever importing other people's code may raise
        raise ConfigError(
            f"{_given(name)}; {_described(registered)} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(policy_class, "from_config", None)):
        raise ConfigError(
            f"{_given(name)}; {_described(registered)} has no classmethod from_config"
        )
    return cast(PolicyClass, policy_class)


@cache  # reading the metadata of all packages takes some ten milliseconds
def _registered() -> dict[str, list[EntryPoint]]:
    by_name: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        by_name.setdefault(entry_point.name, []).append(entry_point)
    return by_name


def _given(name: str) -> str:
    return f"scheduler.policy: got {name!r}"


def _described(registered: list[EntryPoint]) -> str:
    return " and ".join(
        f"entry point {one.name} = {one.value} of the package {one.dist.name if one.dist else '?'}"
        for one in registered
    )
