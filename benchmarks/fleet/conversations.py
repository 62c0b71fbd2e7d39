"""Multi-turn chats with shared system prompts, as they arrive at a fleet."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastserve_backend.job import Job
from fastserve_backend.sampling_params import SamplingParams
from fastserve_bench.workload import LengthLimits, load_lengths
from fastserve_gateway.routing.prefixes import prompt_prefixes
from fastserve_gateway.routing.request import RoutedRequest

NUM_SYSTEM_PROMPTS = 16
# Tokens of a system prompt: from a few rules to instructions with tools.
LEAST_SYSTEM, MOST_SYSTEM = 200, 2000
MEAN_TURNS, MOST_TURNS = 6, 20
MOST_TOKENS = 8000  # of a conversation
DOCUMENT_TOKENS = 4000
# Seconds from an answer to the next question: half of them up to the median, a few very long.
MEDIAN_THOUGHT_S, THOUGHT_SIGMA, LONGEST_THOUGHT_S = 10.0, 0.8, 120.0
# Of the turns before the simulation.
TOKEN_S = 0.03
LONGEST_CHAT_S = 300.0


@dataclass(slots=True)
class Turn:
    """A question and its answer."""

    question_tokens: int
    answer_tokens: int
    thought_s: float
    """Time after the answer until the next question."""


@dataclass(slots=True)
class Conversation:
    """A chat. Its next turn comes some time after its last answer."""

    number: int
    begins_s: float
    turns: Sequence[Turn]
    parts: list[array[int]]
    """The tokens of all messages, first the system prompt."""
    num_begun: int = 0
    """Turns that have begun, also those before the simulation."""
    prompt: array[int] = field(default_factory=lambda: array("i"))
    num_skipped: int = 0
    """Turns before the simulation."""

    @property
    def is_resumed(self) -> bool:
        """Whether the present turn is the first one after turns before the simulation, whose KV no
        server can have."""
        return self.num_skipped > 0 and self.num_begun == self.num_skipped + 1

    def begin_turn(self, number: int, arrival_s: float) -> Job:
        turn = self.turns[self.num_begun]
        self.num_begun += 1
        self.parts.append(self._own_tokens(turn.question_tokens))
        self.prompt = array("i")
        for part in self.parts:
            self.prompt += part
        return Job(
            id=str(number),
            number=number,
            prompt_ids=self.prompt,
            params=SamplingParams(max_tokens=turn.answer_tokens, temperature=0, ignore_eos=True),
            arrival_s=arrival_s,
        )

    def routed(self) -> RoutedRequest:
        """The turn that has begun, as a gateway sees it."""
        prefixes = prompt_prefixes(part.tobytes() for part in self.parts)
        end = sum(4 * len(part) for part in self.parts[:2])
        conversation = next(prefix.key for prefix in prefixes if prefix.end == end)
        return RoutedRequest(len(self.prompt), prefixes, conversation=conversation)

    def end_turn(self, now_s: float) -> float | None:
        """When the next turn begins; None: it was the last one."""
        turn = self.turns[self.num_begun - 1]
        self.parts.append(array("i", bytes(4 * turn.answer_tokens)))
        if self.num_begun == len(self.turns):
            return None
        return now_s + turn.thought_s

    def skip_turns(self, count: int) -> None:
        """The conversation had so many turns before the simulation began."""
        for turn in self.turns[:count]:
            self.parts.append(self._own_tokens(turn.question_tokens))
            self.parts.append(array("i", bytes(4 * turn.answer_tokens)))
        self.num_begun = self.num_skipped = count

    def _own_tokens(self, count: int) -> array[int]:
        """Tokens that no other conversation has."""
        first = 10**6 + self.number * 10**4 + sum(map(len, self.parts))
        return array("i", range(first, first + count))


def make_conversations(
    rate: float, span_s: float, seed: int, documents: float = 0.0
) -> list[Conversation]:
    """Chats that begin at random times, ``rate`` a second in the mean.

    Those that have begun before the simulation, and go on, are in the middle of a conversation.

    Args:
        documents: share of chats whose first question has a document.
    """
    rng = random.Random(seed)
    lengths = load_lengths("sharegpt", LengthLimits(max_total_tokens=2048))
    systems = [
        array("i", range(1 + 2000 * one, 1 + 2000 * one + rng.randint(LEAST_SYSTEM, MOST_SYSTEM)))
        for one in range(NUM_SYSTEM_PROMPTS)
    ]
    weights = [1 / (1 + one) for one in range(NUM_SYSTEM_PROMPTS)]
    conversations: list[Conversation] = []
    now_s = -LONGEST_CHAT_S
    while now_s < span_s:
        (system,) = rng.choices(systems, weights)
        turns: list[Turn] = []
        total = len(system)
        added = DOCUMENT_TOKENS if documents and rng.random() < documents else 0
        for _ in range(1 + min(MOST_TURNS - 1, int(rng.expovariate(1 / (MEAN_TURNS - 0.5))))):
            question, answer = rng.choice(lengths)
            question, added = question + added, 0
            total += question + answer
            if turns and total > MOST_TOKENS:
                break
            thought_s = MEDIAN_THOUGHT_S * rng.lognormvariate(0, THOUGHT_SIGMA)
            turns.append(Turn(question, answer, min(LONGEST_THOUGHT_S, thought_s)))
        conversation = Conversation(len(conversations), now_s, turns, [system])
        skipped, begins_s = 0, now_s
        while begins_s < 0 and skipped < len(turns):
            begins_s += turns[skipped].thought_s + turns[skipped].answer_tokens * TOKEN_S
            skipped += 1
        if skipped < len(turns):
            conversation.skip_turns(skipped)
            conversation.begins_s = begins_s
            conversations.append(conversation)
        now_s += rng.expovariate(rate)
    return conversations
