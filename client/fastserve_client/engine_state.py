"""The engine at one moment, for requests with ``watch_interval_ms``.

It has numbers and the names of tenants, but neither text nor request ids.

Client and server import this module, so it depends only on the standard library. On the wire it
is JSON with the names of these fields. Client and server may be of different versions: a new field
has a default, for servers that do not send it, and is ignored by clients that do not know it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

MAX_LISTED_JOBS: Final = 256
"""A picture lists so many unfinished jobs and only counts the others."""

_Part = TypeVar("_Part")

State = Literal["waiting", "running", "preempted", "swapping_out", "swapped", "swapping_in"]


@dataclass(frozen=True, slots=True)
class ListedJob:
    """One unfinished job."""

    number: int
    """Order of arrival since the server's start."""
    state: State
    """``running``: part of the latest iteration. ``swapping_out``, ``swapped``, ``swapping_in``:
    set aside, and its KV is on its way to the host, there, or on its way back. ``preempted``: set
    aside, its KV on the device or dropped. ``waiting``: never ran."""
    level: int
    """Queue of the policy; 0 is the highest."""
    prompt_tokens: int
    output_tokens: int
    """Generated so far."""
    device_blocks: int
    """Blocks that no other job has."""
    host_blocks: int
    """Likewise. A job on the device may have blocks here too: copies that were kept or made
    ahead."""
    waited_s: float
    """Seconds since its arrival in which it was part of no iteration."""
    num_preemptions: int
    priority: int = 0
    """Lower runs first."""
    tenant: str = ""
    ttft_slo_s: float | None = None
    """Wanted time to the first token, in seconds; None: no objective."""
    tpot_slo_s: float | None = None
    """Wanted time for each later token, in seconds; None: no objective."""
    late_s: float | None = None
    """How late its next token is, in seconds; negative: the time left. None: no objective."""


@dataclass(frozen=True, slots=True)
class LevelState:
    """One queue of the policy."""

    quantum_s: float | None
    """Execution time after which a job sinks, seconds. For a job with a predicted length: the
    longest remaining time. ``None``: the policy has no quanta."""
    num_jobs: int


@dataclass(frozen=True, slots=True)
class PriorityState:
    """The jobs of one priority."""

    priority: int
    num_jobs: int


@dataclass(frozen=True, slots=True)
class TierState:
    """KV blocks of the device or of the host."""

    used_blocks: int
    num_blocks: int
    shared_blocks: int = 0
    """Used blocks that several jobs have."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals since the server's start."""

    prompt_tokens: int
    generation_tokens: int
    iterations: int
    preemptions: int
    demotions: int
    promotions: int
    swap_out_bytes: int
    swap_in_bytes: int
    worker_restarts: int
    reused_prompt_tokens: int = 0
    """The part of ``prompt_tokens`` that was not computed, because its KV was there already."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """A picture of the engine, made between two iterations."""

    time_s: float
    """Seconds of the engine's clock. Only differences between two pictures have a meaning."""
    policy: str
    policy_description: str
    """One line with the policy's derived values."""
    levels: tuple[LevelState, ...]
    """Queues, highest first; policies without queues have one."""
    jobs: tuple[ListedJob, ...]
    """At most ``MAX_LISTED_JOBS``: running jobs first, then the others in order of arrival."""
    running: int
    waiting: int
    """All unfinished jobs that do not run, swapped ones included."""
    swapped: int
    """The waiting jobs whose KV is on the host or on its way from or to it."""
    block_size: int
    """Tokens in one KV block."""
    device: TierState
    host: TierState
    totals: Totals
    priorities: tuple[PriorityState, ...] = ()
    """Those that unfinished jobs have, lowest first."""
    waiting_prompt_tokens: int = 0
    """Tokens that jobs without a first token still have to compute. Prompts that never ran count
    in full, also where their beginning is in the cache."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens that a second computes beside the jobs that decode now, by the latency
    profile; None: the server does not tell."""
    num_groups: int = 1
    """Blocks that the same ``block_size`` tokens take: one for each group of layers."""

    @classmethod
    def from_json(cls, text: str) -> EngineState:
        """Raises ValueError, KeyError or TypeError if the text is no such picture."""
        values: dict[str, Any] = json.loads(text)
        parts = {
            "levels": tuple(_known(LevelState, level) for level in values["levels"]),
            "jobs": tuple(_known(ListedJob, job) for job in values["jobs"]),
            "device": _known(TierState, values["device"]),
            "host": _known(TierState, values["host"]),
            "totals": _known(Totals, values["totals"]),
            "priorities": tuple(_known(PriorityState, one) for one in values.get("priorities", ())),
        }
        return _known(cls, values | parts)


def _known(kind: type[_Part], values: dict[str, Any]) -> _Part:
    """The dataclass ``kind`` with the values that it has fields for."""
    names: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
    return kind(**{name: values[name] for name in names if name in values})
