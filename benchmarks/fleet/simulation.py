"""Gateways and a fleet on one virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastserve_backend.job import Job
from fastserve_gateway.routing.request import ServerChoice
from fastserve_gateway.routing.server_load import ServerLoad

from benchmarks.fleet.conversations import Conversation
from benchmarks.fleet.sides import Chooser
from benchmarks.fleet.simulated_server import Progress, SimulatedServer

# A server sends a picture after every interval, and it takes some time to the gateway.
INTERVAL_S, TRANSIT_S = 0.25, 0.25


@dataclass(slots=True)
class Sent:
    """A job that a gateway has sent."""

    job: Job
    conversation: Conversation
    gateway: int
    choice: ServerChoice
    first_token_s: float | None = None


@dataclass(slots=True)
class Outcome:
    """Of the jobs that arrived after the warm-up, without those that resume a chat from before."""

    ttft_s: list[float] = field(default_factory=list)
    expected_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_ended: int = 0
    num_lost: int = 0
    """Jobs whose server died after their first token."""
    num_retried: int = 0
    """Jobs whose server died before it."""
    backlog: list[int] = field(default_factory=list)
    """Unfinished jobs after each second."""


class FleetSimulation:
    """Serves conversations. ``run`` once.

    Args:
        routers: one for each gateway. Each turn goes through a random one.
        warm_up_s: jobs that arrive earlier do not count.
        dies_s: when server 0 dies for ever; None: it lives.
    """

    def __init__(
        self,
        servers: Sequence[SimulatedServer],
        routers: Sequence[Chooser],
        conversations: Sequence[Conversation],
        *,
        warm_up_s: float,
        span_s: float,
        seed: int = 0,
        dies_s: float | None = None,
    ) -> None:
        self.outcome = Outcome()
        self._servers = servers
        self._routers = routers
        self._rng = random.Random(seed)
        self._warm_up_s, self._span_s = warm_up_s, span_s
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._busy = [False] * len(servers)
        self._picture_due = [False] * len(servers)
        self._sent: dict[int, Sent] = {}
        self._dead: set[int] = set()
        self.now_s = 0.0
        for conversation in conversations:
            self._at(conversation.begins_s, self._on_turn, conversation)
        for server in range(len(servers)):
            self._at(self._rng.uniform(0, INTERVAL_S), self._on_picture_due, server)
        self._at(1.0, self._on_second)
        if dies_s is not None:
            self._at(dies_s, self._on_death, 0)

    def run(self) -> Outcome:
        while self._events:
            self.now_s, _, handle, values = heapq.heappop(self._events)
            if self.now_s > self._span_s:
                break
            handle(*values)
        return self.outcome

    def _at(self, time_s: float, handle: Callable[..., None], *values: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), handle, values))

    def _on_turn(self, conversation: Conversation) -> None:
        job = conversation.begin_turn(next(self._numbers), self.now_s)
        self._send(job, conversation)

    def _send(self, job: Job, conversation: Conversation) -> None:
        gateway = self._rng.randrange(len(self._routers))
        choice = self._routers[gateway].choose(conversation.routed(), self.now_s)
        assert choice is not None
        self._sent[job.number] = Sent(job, conversation, gateway, choice)
        server = self._servers[choice.server]
        server.add(job, self.now_s)
        if not self._busy[choice.server]:
            self._busy[choice.server] = True
            self._run_cycle(choice.server)

    def _run_cycle(self, server: int) -> None:
        progress = self._servers[server].run_cycle()
        self._at(self._servers[server].clock.now(), self._on_cycle_end, server, progress)

    def _on_cycle_end(self, server: int, progress: Progress) -> None:
        if server in self._dead:
            return
        for job in progress.first_tokens:
            sent = self._sent[job.number]
            sent.first_token_s = self.now_s
            self._routers[sent.gateway].on_first_token(sent.choice)
        for job in progress.ends:
            self._on_end(self._sent.pop(job.number))
        if self._picture_due[server]:
            self._take_picture(server)
        if self._servers[server].loop.is_idle:
            self._busy[server] = False
        else:
            self._run_cycle(server)

    def _on_end(self, sent: Sent) -> None:
        self._routers[sent.gateway].on_end(sent.choice)
        job, outcome = sent.job, self.outcome
        if job.arrival_s >= self._warm_up_s and not sent.conversation.is_resumed:
            assert sent.first_token_s is not None
            outcome.num_ended += 1
            outcome.ttft_s.append(sent.first_token_s - job.arrival_s)
            outcome.expected_s.append(sent.choice.delay_s)
            outcome.latency_s.append(self.now_s - job.arrival_s)
            outcome.prompt_tokens += len(job.prompt_ids)
            outcome.cached_tokens += job.num_cached_tokens
        next_s = sent.conversation.end_turn(self.now_s)
        if next_s is not None:
            self._at(next_s, self._on_turn, sent.conversation)

    def _on_second(self) -> None:
        self.outcome.backlog.append(len(self._sent))
        self._at(self.now_s + 1.0, self._on_second)

    # --- pictures -----------------------------------------------------------------------------

    def _on_picture_due(self, server: int) -> None:
        if server in self._dead:
            return
        if self._busy[server]:
            self._picture_due[server] = True
        else:
            self._take_picture(server)
        self._at(self.now_s + INTERVAL_S, self._on_picture_due, server)

    def _take_picture(self, server: int) -> None:
        self._picture_due[server] = False
        load = ServerLoad.of(self._servers[server].picture())
        self._at(self.now_s + TRANSIT_S, self._on_load, server, load)

    def _on_load(self, server: int, load: ServerLoad) -> None:
        if server not in self._dead:
            for router in self._routers:
                router.on_load(server, load, self.now_s)

    # --- death --------------------------------------------------------------------------------

    def _on_death(self, server: int) -> None:
        """What has not begun goes to other servers; what has begun is lost."""
        self._dead.add(server)
        for router in self._routers:
            router.on_down(server)
        for sent in [one for one in self._sent.values() if one.choice.server == server]:
            del self._sent[sent.job.number]
            self._routers[sent.gateway].on_end(sent.choice)
            if sent.first_token_s is not None:
                self.outcome.num_lost += 1
                continue
            self.outcome.num_retried += 1
            old = sent.job
            again = Job(old.id, old.number, old.prompt_ids, old.params, old.arrival_s)
            self._send(again, sent.conversation)
