"""The settings of a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import InvalidRequest

from fastserve_gateway.auth import ApiKeys
from fastserve_gateway.browsers import check_origins
from fastserve_gateway.model_formats import FormatNames


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    urls: Sequence[str]
    """Endpoints of the tritonservers, gRPC or HTTP. Each has all models, or some of them."""
    models: Sequence[str]
    """The models' names there and in the API."""
    keys: ApiKeys
    strict: bool
    """True: unknown fields are errors."""
    max_body_bytes: int
    max_held_bytes: int
    """The bytes of all unanswered requests, and of their answers."""
    max_jobs: int
    """Most answers to one request: prompts times ``n``."""
    max_moves: int
    """How often an answer may lose its server and go on at one that works."""
    max_stored_bytes: int
    """The bytes of all stored responses; 0 stores none."""
    formats: FormatNames = field(default_factory=FormatNames)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of models in the API. ``*`` stands for all other names."""
    cors_origins: Sequence[str] = ()
    """Sites whose pages may use the gateway from a browser; ``*``: all."""
    share_kv: bool = False
    """True: tenants use each other's KV of equal beginnings of prompts, which usage then shows."""

    @property
    def max_answer_bytes(self) -> int:
        """What one answer may count (``answer_size.py``): it must leave room for others."""
        return self.max_held_bytes // 4

    def __post_init__(self) -> None:
        _refuse_twice("url", [str(Endpoint.parse(url)) for url in self.urls])
        _refuse_twice("model", self.models)
        _refuse_twice("cors_origin", self.cors_origins)
        check_origins(self.cors_origins)
        if "" in self.models:
            raise InvalidRequest("model: got an empty name; must be the model's name at Triton")
        for alias, name in self.aliases.items():
            if name not in self.models or alias in self.models or not alias:
                raise InvalidRequest(
                    f"alias: got {alias!r} for {name!r}; must be a name that no model has, and the "
                    f"name of a model: {', '.join(self.models)}"
                )
        # A tenant of the smallest weight has half of it at most.
        least = self.max_body_bytes * (2 if self.keys.are_of_tenants else 1)
        if self.max_held_bytes < least:
            raise InvalidRequest(
                f"max_held_bytes: got {self.max_held_bytes}; must be at least {least} for a "
                f"max_body_bytes of {self.max_body_bytes}, or the largest would never be taken"
            )


def _refuse_twice(flag: str, values: Sequence[str]) -> None:
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise InvalidRequest(f"{flag}: got {twice[0]} twice; give each once")
