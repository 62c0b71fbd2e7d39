"""PTX text as a list of instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from ptx.errors import UnknownCode
from ptx.formats import SIZES

_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_NOT_EXECUTED = (".loc", ".reg", ".pragma")
# Known modifiers of the kernels' instructions; an unknown one could change an instruction's effect.
_MODIFIERS = frozenset([
    "NaN", "acq_rel", "add", "aligned", "approx", "async", "b16", "b32", "b64", "b8", "bf16",
    "bf16x2", "bfly", "ca", "cg", "col", "commit_group", "cta", "eq", "f16", "f16x2", "f32",
    "fence", "ftz", "full", "ge", "global", "gpu", "gt", "hi", "idx", "l", "launch_dependents",
    "le", "lo", "lt", "m16n8k16", "m8n8", "max", "min", "mma_async", "ne", "param", "pred", "proxy",
    "r", "relu", "rn", "row", "rzi", "s16", "s32", "s64", "s8", "shared", "shared::cta", "sync",
    "trans", "u16", "u32", "u64", "uni", "up", "v2", "v4", "wait", "wait_group", "warp", "wide",
    "wrap", "x1", "x2", "x4",
])  # fmt: skip

_MOST_BYTES = 16
"""What one instruction of a thread uses of shared memory."""


@dataclass(frozen=True)
class Instruction:
    text: str
    guard: str | None
    """Predicate register that selects the executing threads, or the others if ``is_negated``."""
    is_negated: bool
    parts: tuple[str, ...]
    """Parts of its name, such as "ld", "global", "v4", "b32"."""
    operands: tuple[str, ...]
    """Operands as written; a vector has its braces, an address its brackets."""

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
    """Index of the instruction after each label."""

    @property
    def has_atomics(self) -> bool:
        return any(one.parts[0] == "atom" for one in self.instructions)

    @cached_property
    def shared_unit(self) -> int:
        """Bytes of shared memory that each instruction uses together, at most 16."""
        return min((_shared_bytes(one) for one in self.instructions), default=_MOST_BYTES)

    @staticmethod
    def parse(text: str) -> Program:
        head, _, body = text[text.index(".entry") :].partition("\n{")
        threads = re.search(r"\.reqntid (\d+)", head)
        if threads is None:
            raise UnknownCode("a kernel for any number of threads")
        instructions: list[Instruction] = []
        labels = {}
        for code in _lines(body):
            if code.endswith(":"):
                labels[code[:-1]] = len(instructions)
            elif code and not code.startswith(_NOT_EXECUTED):
                instructions += [_instruction(one.strip()) for one in code.split(";") if one]
        parameters = re.findall(r"\.param .* (\w+),?\n", head)
        return Program(int(threads[1]), tuple(parameters), tuple(instructions), labels)


def _shared_bytes(instruction: Instruction) -> int:
    """Bytes of shared memory that a thread uses; ``_MOST_BYTES`` if none."""
    name, *parts = instruction.parts
    if name in ("ld", "st") and parts[0] == "shared":
        registers = vector(instruction.operands[0 if name == "ld" else 1])
        return SIZES[instruction.type] * len(registers)
    if name == "cp" and "shared" in parts:
        return int(instruction.operands[2], 0)
    return _MOST_BYTES


def _lines(body: str) -> Iterator[str]:
    """The kernel's lines to its end, without comments. Registers of inline assembly's blocks get
    the % that others have."""
    depth, local = 0, ""
    for line in body.split("\n"):
        code = line.partition("//")[0].strip()
        if code == "{":
            depth, local = depth + 1, ""
        elif code == "}":
            if depth == 0:
                return
            depth -= 1
        elif depth and code.startswith(".reg"):
            names = re.findall(r"(\w+)<\d+>", code)
            local = "|".join([*filter(None, [local]), *names])
        elif depth:
            yield re.sub(rf"(?<![%.\w])({local})(\d+)\b", r"%\1\2", code)
        else:
            yield code


@cache
def vector(operand: str) -> tuple[str, ...]:
    """The registers of ``{%r1, %r2}``, or the one that stands alone."""
    return tuple(register.strip() for register in operand.strip("{} ").split(","))


def _instruction(text: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    if match is None:
        raise UnknownCode(text)
    negation, guard, name, operands = match.groups()
    parts = tuple(name.split("."))
    for part in parts[1:]:
        if part not in _MODIFIERS and not re.fullmatch(r"m64n\d+k16", part):
            raise UnknownCode(f"{text}: .{part}")
    # Commas within braces and brackets separate no operands.
    found = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\s])+", operands)
    return Instruction(text, guard, bool(negation), parts, tuple(found))
