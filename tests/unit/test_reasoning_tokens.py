"""Tokens of reasoning are counted alike however the answer is cut into chunks."""

from __future__ import annotations

import pytest
from fastserve_chat.answer_format import AnswerFormat
from fastserve_chat.reasoning_formats import REASONING_FORMATS
from fastserve_chat.tool_formats import TOOL_FORMATS
from fastserve_client.results import Chunk
from fastserve_gateway.choice_parts import ChoiceParts

THOUGHT, ANSWER = "<think>" + "so it is " * 10, "</think>" + "yes. " * 20


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_a_chunk_with_the_end_of_reasoning_is_divided(size: int) -> None:
    """A token for each character."""
    form = AnswerFormat(tool_format=TOOL_FORMATS["hermes"], reasoning=REASONING_FORMATS["think"])
    parts = ChoiceParts(form.reader())
    text = THOUGHT + ANSWER
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        parts.read(Chunk(piece, tuple(range(len(piece)))))
    parts.read(Chunk("", (), "stop"))
    assert parts.num_reasoning_tokens == pytest.approx(len(THOUGHT), abs=10)
