"""Instructions and answers as Alpaca's: JSON lines with ``instruction``, ``input``, ``output``."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from fastserve_backend.checkpoints.chat_template import Message


@dataclass(frozen=True, slots=True)
class Instruction:
    prompt: str
    """The instruction, and below it the input, if it has one."""
    answer: str

    @property
    def sha256(self) -> str:
        """Hash of the prompt. It names the prompt where no text is kept, and divides data sets."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.prompt}]


FIRST_HELD_OUT = 8
"""Tenths from this one on are for judging: no predictor learns them."""


def part(sha256: str) -> int:
    """The tenth of all prompts, 0 to 9, to which the one with this hash belongs."""
    return int(sha256[:8], 16) % 10


def read_instructions(path: Path) -> list[Instruction]:
    """A file's instructions in its order, without repeated prompts."""
    found: dict[str, Instruction] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            fields = json.loads(line)
            prompt = "\n\n".join(part for part in (fields["instruction"], fields["input"]) if part)
            found.setdefault(prompt, Instruction(prompt, fields["output"]))
    return list(found.values())


def read_lengths(path: Path) -> dict[str, int]:
    """Output tokens by the prompt's hash, from a CSV of output_lengths.py."""
    with path.open(newline="", encoding="utf-8") as file:
        return {row["prompt_sha256"]: int(row["output_tokens"]) for row in csv.DictReader(file)}
