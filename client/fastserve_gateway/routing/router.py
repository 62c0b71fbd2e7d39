"""Chooses the server for each request.

The best server is the one with the least expected delay to the first token: the prompt tokens that
wait there, and those of the prompt itself that it does not have. Both are divided by the server's
speed. docs/replicas.md explains the parts and what each of them gains.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fastserve_gateway.routing.prefix_memory import PrefixMemory
from fastserve_gateway.routing.rendezvous import Rendezvous, stable_hash
from fastserve_gateway.routing.request import RoutedRequest, ServerChoice
from fastserve_gateway.routing.server_load import ServerLoad
from fastserve_gateway.routing.server_queue import STALE_S, ServerQueue

MAX_SESSIONS: Final = 1 << 16
"""Sessions that are remembered; the longest unused one is forgotten first."""

# A token of the prompt that has to be computed counts so many times: it delays later requests too.
_COMPUTE_WEIGHT = 4.0
# A home counts as having the prompt, times so often the share of jobs of other gateways, at most 1.
_OTHERS_WEIGHT = 2.0
# But only so much of it, where this gateway has sent an earlier turn itself: mostly the latest one.
_KNOWN_SHARE = 0.8
# The share of other gateways is that of about so many latest pictures.
_NUM_PICTURES = 200
_NEVER = float("inf")


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: RoutedRequest
    has_begun: bool = False


class Router:
    """Knows what its gateway sent to each server, and what the servers tell of themselves.

    Not thread-safe. Times are seconds of one clock that never goes back.

    Args:
        servers: their names. Gateways with the same names agree on where a new prompt goes. All
            are up at first.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        self._up = [True] * len(servers)
        self._queues = [ServerQueue() for _ in servers]
        self._computed_tokens = [0] * len(servers)
        self._memory = PrefixMemory(len(servers))
        self._rendezvous = Rendezvous(servers)
        # Session → its server and the tokens of its latest prompt.
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count()
        self._next_check_s = 0.0
        # Sums over the latest pictures: this gateway's requests, and all jobs.
        self._own_jobs = self._all_jobs = 0.0

    def choose(
        self, request: RoutedRequest, now_s: float, excluded: Collection[int] = ()
    ) -> ServerChoice | None:
        """The best server for a request. It counts as sent there until ``on_end``.

        Args:
            excluded: servers that must not be chosen, such as those that have refused it.

        Returns None if no server takes requests.
        """
        self._forget_stale_pictures(now_s)
        prompt = request.prompt_tokens
        weighted = _COMPUTE_WEIGHT * prompt
        costs = [
            queue.wait_s + weighted * queue.s_per_token if is_up else _NEVER
            for queue, is_up in zip(self._queues, self._up, strict=True)
        ]
        for server in excluded:
            costs[server] = _NEVER
        able = [server for server, cost in enumerate(costs) if cost < _NEVER]
        if not able:
            return None
        cached = self._cached_tokens(request)
        for server, tokens in cached.items():
            costs[server] -= _COMPUTE_WEIGHT * tokens * self._queues[server].s_per_token
        key = _home_key(request)
        if key is not None:
            home = self._rendezvous.first(key, able)
            lacking = self._home_tokens(request, cached) - cached.get(home, 0.0)
            if lacking > 0:
                costs[home] -= _COMPUTE_WEIGHT * lacking * self._queues[home].s_per_token
        number, best = next(self._numbers), min(costs)
        server = costs.index(best)
        if costs.count(best) > 1:
            equals = [server for server in able if costs[server] == best]
            server = self._rendezvous.first(number if key is None else key, equals)
        return self._send(number, request, server, cached.get(server, 0.0), now_s)

    def on_first_token(self, choice: ServerChoice) -> None:
        """The first token of a request has come."""
        sent = self._open.get(choice.number)
        if sent is not None:
            sent.has_begun = True
            self._queues[choice.server].on_first_token(choice.number)

    def on_end(self, choice: ServerChoice) -> None:
        """A request has ended, also by an error. Later calls for it do nothing."""
        sent = self._open.pop(choice.number, None)
        if sent is None:
            return
        self._queues[choice.server].on_end(choice.number)
        if sent.has_begun and self._up[choice.server]:  # its KV is kept from now on
            self._memory.note(sent.request.prefixes, choice.server)

    def on_load(self, server: int, load: ServerLoad, now_s: float) -> None:
        """A server has told its load."""
        queue = self._queues[server]
        queue.on_load(load, now_s)
        kept = 1 - 1 / _NUM_PICTURES
        self._own_jobs = kept * self._own_jobs + queue.num_open
        self._all_jobs = kept * self._all_jobs + max(queue.num_open, load.num_jobs)
        # The reused part of a prompt is counted after the prompt: this may be negative.
        new_tokens = max(0, load.computed_tokens - self._computed_tokens[server])
        self._computed_tokens[server] += new_tokens
        self._memory.on_computed(server, new_tokens, load.kv_tokens)

    def on_down(self, server: int) -> None:
        """A server takes no requests until ``on_up``. What it kept counts as lost."""
        self._up[server] = False
        self._computed_tokens[server] = 0  # it may come back as another process
        self._memory.forget(server)
        kept = [(name, last) for name, last in self._sessions.items() if last[0] != server]
        self._sessions = OrderedDict(kept)

    def on_up(self, server: int) -> None:
        """A server takes requests again."""
        self._up[server] = True

    def _home_tokens(self, request: RoutedRequest, cached: Mapping[int, float]) -> float:
        """How many tokens of the prompt its home counts as having.

        Other gateways may have sent earlier turns there. Gateways agree only if each sends what it
        does not know there, also the first turn.
        """
        if not self._all_jobs:
            return 0.0
        others_share = 1 - self._own_jobs / self._all_jobs
        home_share = min(1.0, _OTHERS_WEIGHT * others_share)
        is_known = request.session in self._sessions
        if request.conversation is not None and cached:
            ends = dict(request.prefixes)
            opening = ends.get(request.conversation, math.inf) / request.prefixes[-1].end
            is_known |= max(cached.values()) >= opening * request.prompt_tokens
        return home_share * request.prompt_tokens * (_KNOWN_SHARE if is_known else 1.0)

    def _cached_tokens(self, request: RoutedRequest) -> dict[int, float]:
        """Tokens of the prompt that servers are expected to have."""
        prompt, prefixes = request.prompt_tokens, request.prefixes
        cached: dict[int, float] = {}
        if prefixes:
            share = prompt / prefixes[-1].end
            found = self._memory.find(prefixes)
            cached = {server: share * end for server, end in found.items()}
        if request.session is not None and request.session in self._sessions:
            # The server holds the KV of a session longer than that of others.
            server, tokens = self._sessions[request.session]
            cached[server] = max(cached.get(server, 0.0), min(tokens, prompt))
        return cached

    def _send(
        self, number: int, request: RoutedRequest, server: int, cached: float, now_s: float
    ) -> ServerChoice:
        queue = self._queues[server]
        computed = request.prompt_tokens - cached
        choice = ServerChoice(
            number, server, queue.wait_s + computed * queue.s_per_token, int(cached)
        )
        self._open[number] = _Open(request)
        queue.on_sent(number, computed, now_s)
        self._memory.note(request.prefixes, server)
        if request.session is not None:
            self._sessions[request.session] = server, request.prompt_tokens
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return choice

    def _forget_stale_pictures(self, now_s: float) -> None:
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + STALE_S / 4
            for queue in self._queues:
                queue.check_age(now_s)


def _home_key(request: RoutedRequest) -> int | None:
    """What decides on the home of a request: the same for all turns, in all gateways."""
    return request.conversation if request.session is None else stable_hash(request.session)
