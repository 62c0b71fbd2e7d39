"""PTX text as a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ptx.errors import UnknownCode

_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_NOT_EXECUTED = (".loc", ".reg", ".pragma")


@dataclass(frozen=True)
class Instruction:
    text: str
    guard: str | None
    """Register that tells which threads execute it; of the others, if ``is_negated``."""
    is_negated: bool
    parts: tuple[str, ...]
    """Of its name, as "ld", "global", "v4", "b32"."""
    operands: tuple[str, ...]
    """As written; a vector with its braces, an address with its brackets."""

    @property
    def type(self) -> str:
        return self.parts[-1]


@dataclass(frozen=True)
class Program:
    """The one kernel of a compilation."""

    threads: int
    parameters: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """Index of the instruction behind each."""

    @staticmethod
    def parse(text: str) -> Program:
        head, _, body = text[text.index(".entry") :].partition("\n{")
        threads = re.search(r"\.reqntid (\d+)", head)
        if threads is None:
            raise UnknownCode("a kernel for any number of threads")
        instructions: list[Instruction] = []
        labels = {}
        for line in body[: body.index("\n}")].split("\n"):
            code = line.partition("//")[0].strip()
            if code.endswith(":"):
                labels[code[:-1]] = len(instructions)
            elif code and not code.startswith(_NOT_EXECUTED):
                instructions += [_instruction(one.strip()) for one in code.split(";") if one]
        parameters = re.findall(r"\.param .* (\w+),?\n", head)
        return Program(int(threads[1]), tuple(parameters), tuple(instructions), labels)


def vector(operand: str) -> list[str]:
    """The registers of ``{%r1, %r2}``, or the one that stands alone."""
    return [register.strip() for register in operand.strip("{} ").split(",")]


def _instruction(text: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise UnknownCode(text)
    negation, guard, name, operands = match.groups()
    # Commas within braces and brackets separate no operands.
    found = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\s])+", operands)
    return Instruction(text, guard, bool(negation), tuple(name.split(".")), tuple(found))
