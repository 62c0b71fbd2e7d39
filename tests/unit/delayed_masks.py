"""Masks without grammars that come late and change the tokens."""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence

from fastserve_backend.engine.step_loop import StepLoop
from fastserve_backend.grammars.messages import GrammarRefused, JobFailed, Mask, NewMasks
from fastserve_backend.grammars.structured_output import StructuredOutput


class DelayedMasks:
    """A mask source whose masks hash the grammar and all tokens. Answers come with ``deliver``.

    Args:
        most_turns: the most turns that an answer takes.
    """

    def __init__(self, rng: random.Random, most_turns: int) -> None:
        self.loop: StepLoop
        self.num_late = 0
        self._rng = rng
        self._most_turns = most_turns
        self._hashes: dict[int, int] = {}
        self._num_tokens: Counter[int] = Counter()
        self._due: dict[int, int] = {}

    def begin_job(
        self,
        number: int,
        wanted: StructuredOutput,
        output_ids: array[int],
        *,
        spells_specials: bool = False,
        tenant: str = "",
    ) -> None:
        assert number not in self._hashes
        assert not output_ids
        self._hashes[number] = zlib.crc32(wanted.text.encode())
        self._ask(number)

    def accept_tokens(self, tokens: Sequence[tuple[int, int]]) -> None:
        for number, token_id in tokens:
            assert number not in self._due, "asked while it has not answered"
            self._hashes[number] = zlib.crc32(bytes([token_id]), self._hashes[number])
            self._num_tokens[number] += 1
            self._ask(number)

    def end_job(self, number: int) -> None:
        del self._hashes[number]
        self._due.pop(number, None)

    def _ask(self, number: int) -> None:
        self._due[number] = self._rng.randint(0, self._most_turns)

    def deliver(self) -> None:
        """Delivers the answers that are due. Called between two cycles."""
        for number, turns in list(self._due.items()):
            if turns > 0:
                self._due[number] -= 1
                self.num_late += 1
                continue
            if self._due.pop(number, None) is None:
                continue  # the job has just ended
            bits = self._hashes[number].to_bytes(4, "little")
            self.loop.jobs.on_mask_answer(NewMasks([Mask(number, self._num_tokens[number], bits)]))

    def refuse(self, number: int, reason: str) -> None:
        self.loop.jobs.on_mask_answer(GrammarRefused(number, reason))

    def fail(self, number: int, reason: str) -> None:
        self.loop.jobs.on_mask_answer(JobFailed(number, reason))
