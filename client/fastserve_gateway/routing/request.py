"""A request before it has a server, and the server that was chosen for it."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_gateway.routing.prefixes import Prefix


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What is known of a request when its server is chosen."""

    prompt_tokens: int
    """May be an estimate."""
    prefixes: tuple[Prefix, ...] = ()
    """Of the prompt (``prompt_prefixes``)."""
    conversation: int | None = None
    """Key of the prefix that ends with a chat's first question, the same in all of its turns; None:
    unknown."""
    session: str | None = None
    """Names the tenant, its session and their salt; None: it belongs to none."""


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """The server that a request goes to. It also names the request in later calls."""

    number: int
    """Of the router's choices."""
    server: int
    """Index in the router's list."""
    delay_s: float
    """Expected seconds to the first token."""
    cached_tokens: int
    """Prompt tokens whose KV the server is expected to have."""
