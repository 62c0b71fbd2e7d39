"""Ways to choose a server: the usual ones, and the gateway's."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastserve_gateway.routing.rendezvous import Rendezvous
from fastserve_gateway.routing.request import RoutedRequest, ServerChoice
from fastserve_gateway.routing.router import Router
from fastserve_gateway.routing.server_load import ServerLoad


class Chooser(Protocol):
    """What a gateway asks for a server (``Router``)."""

    def choose(
        self, request: RoutedRequest, now_s: float, excluded: Collection[int] = ()
    ) -> ServerChoice | None: ...

    def on_first_token(self, choice: ServerChoice) -> None: ...

    def on_end(self, choice: ServerChoice) -> None: ...

    def on_load(self, server: int, load: ServerLoad, now_s: float) -> None: ...

    def on_down(self, server: int) -> None: ...


class _Simple:
    """Knows which servers are up and how many requests each has."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.rng = random.Random(len(servers))
        self.outstanding = [0] * len(servers)
        self.able = list(range(len(servers)))
        self.number = 0

    def pick(self, request: RoutedRequest) -> int:
        raise NotImplementedError

    def choose(
        self, request: RoutedRequest, now_s: float, excluded: Collection[int] = ()
    ) -> ServerChoice | None:
        self.number += 1
        server = self.pick(request)
        self.outstanding[server] += 1
        return ServerChoice(self.number, server, 0.0, 0)

    def on_first_token(self, choice: ServerChoice) -> None: ...

    def on_end(self, choice: ServerChoice) -> None:
        self.outstanding[choice.server] -= 1

    def on_load(self, server: int, load: ServerLoad, now_s: float) -> None: ...

    def on_down(self, server: int) -> None:
        self.able.remove(server)


class _RoundRobin(_Simple):
    def pick(self, request: RoutedRequest) -> int:
        return self.able[self.number % len(self.able)]


class _Random(_Simple):
    def pick(self, request: RoutedRequest) -> int:
        return self.rng.choice(self.able)


class _LeastOutstanding(_Simple):
    def pick(self, request: RoutedRequest) -> int:
        return min(self.able, key=lambda server: (self.outstanding[server], self.rng.random()))


class _TwoChoices(_Simple):
    def pick(self, request: RoutedRequest) -> int:
        two = self.rng.sample(self.able, min(2, len(self.able)))
        return min(two, key=self.outstanding.__getitem__)


class _Hashing(_Simple):
    """Each conversation to its home, however busy that is."""

    def __init__(self, servers: Sequence[str]) -> None:
        super().__init__(servers)
        self._rendezvous = Rendezvous(servers)

    def pick(self, request: RoutedRequest) -> int:
        assert request.conversation is not None
        return self._rendezvous.first(request.conversation, self.able)


class _DelayOnly(Router):
    """Knows nothing of prompts but their lengths."""

    def choose(
        self, request: RoutedRequest, now_s: float, excluded: Collection[int] = ()
    ) -> ServerChoice | None:
        return super().choose(RoutedRequest(request.prompt_tokens), now_s, excluded)


class _PrefixesOnly(Router):
    """Gets no pictures."""

    def on_load(self, server: int, load: ServerLoad, now_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Side:
    """A way to choose, in each of some gateways."""

    make: Callable[[Sequence[str]], Chooser]
    num_gateways: int = 1


BASE = "round robin"
SIDES = {
    BASE: Side(_RoundRobin),
    "random": Side(_Random),
    "least outstanding": Side(_LeastOutstanding),
    "two choices": Side(_TwoChoices),
    "consistent hashing": Side(_Hashing),
    "ours": Side(Router),
    "ours, delay only": Side(_DelayOnly),
    "ours, no pictures": Side(_PrefixesOnly),
    "ours, 2 gateways": Side(Router, 2),
    "ours, 4 gateways": Side(Router, 4),
}
