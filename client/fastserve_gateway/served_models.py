"""The models of the API: each has its servers, its formats and its live views."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve_client.errors import ClientError

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


# A list of models is there at once for clients that only look whether the gateway is.
_ASK_TIMEOUT_S = 2.0

ANY_NAME = "*"
"""The alias that stands for all names that no model has."""


def find_model(
    models: Mapping[str, ServedModel], name: str | None, aliases: Mapping[str, str]
) -> ServedModel:
    """The model with this name, or the only one.

    Args:
        aliases: other names of models.

    Raises ApiError: there is no such model (404), or several and no name (400).
    """
    if name is None:
        if len(models) > 1:
            raise invalid("model", f"must be one of {', '.join(models)}")
        (name,) = models
    served = name if name in models else aliases.get(name, aliases.get(ANY_NAME))
    if served is None:
        raise no_such_model(name, [*models, *aliases])
    return models[served]


async def shown_model(name: str, model: ServedModel) -> dict[str, Any]:
    """What the API shows of a model under a name. It shows no context length while no server says
    that."""
    shown: dict[str, Any] = {"id": name, "object": "model", "owned_by": "fastserve"}
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            num_tokens = await model.formats.context_tokens()
    except (ClientError, TimeoutError):
        return shown
    # The names of vLLM and of OpenRouter.
    return {**shown, "max_model_len": num_tokens, "context_length": num_tokens}
