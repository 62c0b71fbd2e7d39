"""The models of the API: each has its servers, its formats and its live views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastserve_gateway.errors import invalid, no_such_model
from fastserve_gateway.fleet.fleet import Fleet
from fastserve_gateway.live_feed import LiveFeed
from fastserve_gateway.model_formats import DescribedFormats
from fastserve_gateway.turns import Turns


@dataclass(frozen=True, slots=True)
class ServedModel:
    fleet: Fleet
    formats: DescribedFormats
    feeds: Sequence[LiveFeed]
    """The live view of each server."""
    turns: Turns
    """Of requests that start no job."""


def find_model(models: Mapping[str, ServedModel], name: str | None) -> ServedModel:
    """The model with this name, or the only one.

    Raises ApiError: there is no such model (404), or several and no name (400).
    """
    if name is None:
        if len(models) > 1:
            raise invalid("model", f"must be one of {', '.join(models)}")
        (name,) = models
    if name not in models:
        raise no_such_model(name, list(models))
    return models[name]
