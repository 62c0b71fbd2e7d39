"""Data sets of texts: ShareGPT conversations, Alpaca instructions (JSON or JSON Lines).

The tokens of each record's texts are estimated. A job without a prompt or without an output (both
data sets have some) is left out, because nothing would be generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from fastserve_client.errors import WorkloadError

from fastserve_bench.workload.service_class import class_of


def estimate_tokens(text: str) -> int:
    """An estimate without a tokenizer: one token per 4 UTF-8 bytes, rounded up, at least 1.

    That fits English prose with the vocabularies of GPT-2 and OPT. Code and other languages have
    more tokens.
    """
    return max(1, -(-len(text.encode()) // 4))


def read_text_lengths(
    path: str, text: str
) -> tuple[list[tuple[int, int]], list[str], list[str] | None]:
    """Lengths and prompts of the jobs of a file's ``text``. ``path`` is for messages.

    The third result has the names of classes if a record has the key ``class``.

    Raises:
        WorkloadError: another format, or a record that lacks something.
    """
    exchanges = [
        (_valid(prompt), _valid(output), class_of(place, record))
        for place, record in _records(path, text)
        for prompt, output in _exchanges(place, record)
        if prompt and output
    ]
    lengths = [(estimate_tokens(a), estimate_tokens(b)) for a, b, _ in exchanges]
    classes = [name for _, _, name in exchanges]
    return lengths, [prompt for prompt, _, _ in exchanges], classes if any(classes) else None


def _records(path: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each record with its place in the file, for messages."""
    values: Iterable[tuple[str, Any]]
    if text.lstrip().startswith("["):
        whole = _parse_json(path, 1, text)
        values = ((f"{path}: record {i}", value) for i, value in enumerate(whole, start=1))
    else:
        values = (
            (f"{path}:{number}", _parse_json(path, number, line))
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        )
    for place, value in values:
        if not isinstance(value, dict):
            raise WorkloadError(f"{place}: got {_short(value)}; must be a JSON object")
        yield place, value


def _exchanges(place: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (prompt, output) of each job of the record."""
    if "conversations" in record:
        turns = record["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise WorkloadError(
                f"{place}: conversations: got {_short(turns)}; must be a list of turns"
            )
        for turn, answer in pairwise(turns):
            if turn.get("from") == "human" and answer.get("from") == "gpt":
                yield _text(place, turn, "value"), _text(place, answer, "value")
    elif "instruction" in record:
        instruction, extra = _text(place, record, "instruction"), record.get("input") or ""
        if not isinstance(extra, str):
            raise WorkloadError(f"{place}: input: got {_short(extra)}; must be text")
        yield "\n".join(filter(None, (instruction, extra))), _text(place, record, "output")
    else:
        raise WorkloadError(
            f"{place}: got the keys {_short(sorted(record))}; must be a record of ShareGPT "
            "(conversations) or Alpaca (instruction, input, output)"
        )


def _text(place: str, holder: dict[str, Any], key: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        raise WorkloadError(f"{place}: {key}: got {_short(value)}; must be text")
    return value


def _valid(text: str) -> str:
    """Replaces lone surrogates: JSON can hold half a character, which no server takes."""
    return text.encode("utf-8", "replace").decode()


def _parse_json(path: str, first_line: int, text: str) -> Any:
    line = first_line
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        reason = error.msg
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # an integer with more digits than Python converts
        reason = str(error)
    raise WorkloadError(f"{path}:{line}: not JSON ({reason})")


def _short(value: object) -> str:
    """The value for a message, cut short: a conversation can have a megabyte."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
