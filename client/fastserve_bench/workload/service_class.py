"""Classes of jobs: how urgent the jobs of a workload are, and whose."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastserve_client import protocol
from fastserve_client.errors import WorkloadError
from fastserve_client.positive_number import positive_number

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SETTINGS = "priority=N, ttft_slo_ms=N, tpot_slo_ms=N, tenant=NAME, key_variable=NAME"


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """What jobs of a class ask of a server. The default asks for nothing."""

    name: str = ""
    share: float | None = None
    """Of all jobs, relative to the shares of other classes. None: the data set says which jobs have
    this class."""
    priority: int = 0
    """Lower runs first."""
    ttft_slo_s: float | None = None
    """Wanted time to the first token; None: no objective."""
    tpot_slo_s: float | None = None
    """Wanted mean time for each later token; None: no objective."""
    tenant: str = ""
    key_variable: str | None = None
    """The environment variable with the API key of these jobs. None: they have that of all jobs."""

    @classmethod
    def parse(cls, text: str) -> ServiceClass:
        """Reads ``NAME[:SHARE][,SETTING=VALUE]…``.

        Raises:
            WorkloadError: an unknown setting, or a value that is out of its range.
        """
        head, *settings = text.split(",")
        name, colon, share = head.partition(":")
        values: dict[str, Any] = {"name": _checked_name("class", name)}
        if colon:
            values["share"] = _positive(name, "the share", share)
        for setting in settings:
            key, _, value = (part.strip() for part in setting.partition("="))
            if key == "priority":
                values[key] = _whole_number(name, value)
            elif key in ("ttft_slo_ms", "tpot_slo_ms"):
                values[key.replace("_ms", "_s")] = _positive(name, key, value) / 1e3
            elif key in ("tenant", "key_variable") and value:
                values[key] = value
            else:
                raise WorkloadError(f"class: {name}: got {setting!r}; settings are {_SETTINGS}")
        return cls(**values)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a request that the class sets, by their names in the protocol."""
        fields = {
            protocol.PRIORITY: self.priority or None,
            protocol.TTFT_SLO_MS: _milliseconds(self.ttft_slo_s),
            protocol.TPOT_SLO_MS: _milliseconds(self.tpot_slo_s),
            protocol.TENANT: self.tenant or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


NO_CLASS = ServiceClass()


def class_of(place: str, record: Mapping[str, Any]) -> str:
    """The name of a class in a data set's record, under the key ``class``; "" if it has none.

    Raises WorkloadError, which names ``place``.
    """
    value = record.get("class")
    return "" if value in (None, "") else _checked_name(place, str(value))


def _checked_name(place: str, name: str) -> str:
    if not _NAME.fullmatch(name.strip()):
        raise WorkloadError(
            f"{place}: got the class {name[:80]!r}; a name has 1 to 64 letters, digits, '.', '_' "
            "and '-'"
        )
    return name.strip()


def _positive(name: str, key: str, text: str) -> float:
    value = positive_number(text)
    if value is None:
        raise WorkloadError(f"class: {name}: {key}: got {text!r}; must be a number above 0")
    return value


def _milliseconds(time_s: float | None) -> float | None:
    # Rounded, because 0.29 s times 1000 is not 290 ms.
    return None if time_s is None else round(1e3 * time_s, 6)


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise WorkloadError(
            f"class: {name}: priority: got {text!r}; must be a whole number"
        ) from None
