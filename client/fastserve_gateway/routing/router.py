"""Chooses the server for each request."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from fastserve_gateway.routing.request import Choice, RoutedRequest
from fastserve_gateway.routing.server_load import ServerLoad


class Router:
    """Knows what its gateway sent to each server, and what the servers tell of themselves.

    Not thread-safe. Times are seconds of one clock that never goes back.

    Args:
        servers: their names. Gateways with the same names agree on where a new prompt goes. All
            are up at first.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        self._up = [True] * len(servers)
        self._outstanding = [0] * len(servers)
        self._open: dict[int, int] = {}  # choice → server
        self._numbers = itertools.count()

    def choose(
        self, request: RoutedRequest, now_s: float, excluded: Collection[int] = ()
    ) -> Choice | None:
        """The best server for a request. It counts as sent there until ``on_end``.

        Args:
            excluded: servers that must not be chosen, such as those that have refused it.

        Returns None if no server takes requests.
        """
        candidates = [server for server, up in enumerate(self._up) if up and server not in excluded]
        if not candidates:
            return None
        server = min(candidates, key=self._outstanding.__getitem__)
        self._outstanding[server] += 1
        choice = Choice(next(self._numbers), server, 0.0, 0)
        self._open[choice.number] = server
        return choice

    def on_first_token(self, choice: Choice, now_s: float) -> None:
        """The first token of a request has come."""

    def on_end(self, choice: Choice, now_s: float) -> None:
        """A request has ended, also by an error. Later calls for it do nothing."""
        server = self._open.pop(choice.number, None)
        if server is not None:
            self._outstanding[server] -= 1

    def on_load(self, server: int, load: ServerLoad, now_s: float) -> None:
        """A server has told its load."""

    def on_down(self, server: int, now_s: float) -> None:
        """A server takes no requests until ``on_up``. What it kept counts as lost."""
        self._up[server] = False

    def on_up(self, server: int, now_s: float) -> None:
        """A server takes requests again."""
        self._up[server] = True
