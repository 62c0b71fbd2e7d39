"""Grammars of answers with enforced calls, with the engine's own compiler, and readers of what
these grammars let a model write."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fastserve_backend.grammars.compiler import Compiler, accept, next_mask
from fastserve_chat.tool import Tool
from fastserve_chat.tool_formats import TOOL_FORMATS

EOS = 2
# The end, all bytes, and what random answers would hardly spell.
WORDS = [
    b'{"',
    b'": ',
    b'"}',
    b"}\n",
    b"</think>",
    b"[/THINK]",
    b"Here is my response:",
    b"<|end|>",
]
TOKENS = [b""] * 4 + [bytes([value]) for value in range(256)] + WORDS
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "}]"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool("get_weather", SCHEMA, strict=True)
CLOCK = Tool("clock", {"type": "object", "properties": {}, "additionalProperties": False})
MOST_TOKENS = 600
FREE = {name: one for name, one in TOOL_FORMATS.items() if name != "qwen3_coder"}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENS, (EOS,))


def is_allowed(compiler: Compiler, grammar: str, text: str) -> bool:
    ids = [4 + byte for byte in text.encode()]
    matcher = compiler.compile("grammar", grammar)
    return matcher.validate_tokens([*ids, EOS]) > len(ids)


def random_answer(compiler: Compiler, grammar: str, seed: int, ending: list[bytes]) -> str:
    """What a model with random weights writes. It ends where it may, and prefers some tokens."""
    matcher, choose = compiler.compile("grammar", grammar), random.Random(seed)
    text = b""
    for place in range(MOST_TOKENS):
        bits = np.unpackbits(np.frombuffer(next_mask(matcher), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        wanted = [one for one in allowed if TOKENS[one] in ending]
        if EOS in allowed and place > 20:
            return text.decode("utf-8", "replace")
        [token] = choose.choices([one for one in (wanted or allowed) if one != EOS] or [EOS])
        if token == EOS:
            return text.decode("utf-8", "replace")
        text += TOKENS[token]
        accept(matcher, int(token))
    raise AssertionError(text)
