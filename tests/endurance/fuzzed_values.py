"""Values of fields: valid ones, values at the limits and beyond, and malformed ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from fastserve_client import protocol

VOCAB_SIZE = 260
"""Vocabulary size of the model that gets the requests."""

INPUT_NAMES = tuple(spec.name for spec in protocol.INPUTS)
TRITON_FIELDS = (*INPUT_NAMES, *protocol.PARAMETER_KEYS, protocol.REQUEST_ID, "timeout")

Draw = Callable[[Random], Any]

_BORDERS = (0, 1, 2, 16, 17, 20, 21, 50, 100, 101, 127, 128, 129, 259, 260, 300, 301, 1024, 4096)
_POWERS = tuple(2**bits + step for bits in (15, 31, 32, 53, 63, 64, 100) for step in (-1, 0, 1))
_INTEGERS = (*_BORDERS, *_POWERS)
_NUMBERS = (
    *(0.0, 0.009, 0.01, 0.5, 1.0, 1.0000001, 2.0, 2.1, 100.0, 100.1, 1e-6, 5e-324, 1e30, 1e308),
    *(float("nan"), float("inf")),
)
_TEXTS = (
    *("", "a", "b", "Once upon a time", "\0", "a\0b", "\ufeff", "é", "\U0001f600", "\ud800"),
    *("\udfff\ud800", "</s>", "<s>", "<|im_start|>", "{{", "{% raw %}", "true", "None", "nan"),
    *("1e999", "fastserve", "\r\nX: y", "\u2028", "..", "%00", "(" * 300, "a" * 300, "[" * 300),
    *('{"a": 1}', "[1, 2]", "5", "user", "x" * 2000),
)
# Texts that are no JSON, or that parsers read in different ways.
_ODD_JSON = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1E-400", "-0", "1.0", "4.0", "01", "+1"),
    *("9" * 400, "-" + "9" * 30, "0." + "3" * 400, "0x10", "tru", "None", "'a'", '"open', "", ","),
    *("[,]", r'"\ud800"', r'"\udfff\ud800"', r'"\u0000"', r'"\ufeff"', r'"\x"', '"\t"', "/**/1"),
    *('{"a": 1, "a": 2}', "[" * 100_000, "[" * 150 + "]" * 150, '{"a":' * 150 + "1" + "}" * 150),
    *("[" * 9000 + "]" * 9000, '"' + "é" * 3000 + '"', "[" + "1," * 5000 + "1]"),
)
# ASCII, ends of lines and strings, other planes, surrogates and private characters.
_CHARACTER_RANGES = ((0x20, 0x7E), (0, 0x1F), (0x7F, 0x2FFF), (0xD800, 0xFFFF), (0x10000, 0x10FFFF))


def integer(rng: Random) -> int:
    value = rng.choice(_INTEGERS) if rng.random() < 0.8 else rng.getrandbits(rng.randint(1, 70))
    return -value if rng.random() < 0.3 else value


def number(rng: Random) -> float:
    value = rng.choice(_NUMBERS) if rng.random() < 0.8 else rng.expovariate(0.1)
    return -value if rng.random() < 0.3 else value


def text(rng: Random) -> str:
    if rng.random() < 0.8:
        return rng.choice(_TEXTS)
    ranges = rng.choices(_CHARACTER_RANGES, k=rng.randint(1, 12))
    return "".join(chr(rng.randint(*one)) for one in ranges)


def junk(rng: Random, depth: int = 3) -> Any:
    kind = rng.randint(0, 6 if depth else 4)
    if kind < 5:
        drawn: tuple[Draw, ...] = (integer, number, text, boolean, lambda _: None)
        return drawn[kind](rng)
    parts = [junk(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return parts if kind == 5 else {text(rng): part for part in parts}


def boolean(rng: Random) -> bool:
    return rng.random() < 0.5


def _one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def whole_number(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _between(low: float, high: float) -> Draw:
    return lambda rng: rng.uniform(low, high)


def _some(draw: Draw, least: int = 0, most: int = 3) -> Draw:
    return lambda rng: [draw(rng) for _ in range(rng.randint(least, most))]


def either(*draws: Draw) -> Draw:
    return lambda rng: rng.choice(draws)(rng)


_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}
_SCHEMAS_OF_TEXT = (_SCHEMA, {}, {"type": "x"}, {"$ref": "#"}, {"type": "string", "format": "x"})
_FORMS = _one_of(
    *({"json_schema": schema} for schema in _SCHEMAS_OF_TEXT),
    *({"json_object": True}, {"json_schema": True}, {"regex": "[ab]{2}"}, {"regex": "("}, {}),
    *({"choice": ["a", "é"]}, {"choice": []}, {"regex": "a", "choice": ["a"]}, {"regex": "\0"}),
    *({"grammar": 'start: "a" | "b"'}, {"grammar": "start: other"}, {"regex": "(a|b){9999}{9999}"}),
)
_FORMATS = _one_of(
    *({"type": kind} for kind in ("text", "json_object", "json_schema", "x", 5)),
    *({"type": "json_schema", "schema": schema} for schema in _SCHEMAS_OF_TEXT),
    *(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": one}}
        for one in _SCHEMAS_OF_TEXT
    ),
    *({"type": "json_schema", "json_schema": {"name": "a"}}, {"type": "json_object", "schema": {}}),
)
_TOOLS = (
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    *({"type": "function"}, {}, "add"),
)


_ITEMS = (
    *("text", "input_text", "image_url", "tool_use", "tool_result", "thinking"),
    *("reasoning", "function_call", "function_call_output", "message"),
)


def _item(rng: Random) -> dict[str, Any]:
    """An item, block or part of one of the APIs."""
    names = ("call_id", "name", "arguments", "output", "id", "input", "tool_use_id", "content")
    fields = {name: rng.choice((text, text, junk))(rng) for name in rng.choices(names, k=4)}
    return {"type": rng.choice(_ITEMS), **fields}


def _part(rng: Random) -> dict[str, Any]:
    return {"type": "text", "text": text(rng)} if boolean(rng) else _item(rng)


def _message(rng: Random) -> dict[str, Any]:
    message = {"role": rng.choice(("user", "user", "system", "assistant", "tool", "\0"))}
    message["content"] = text(rng) if rng.random() < 0.7 else _some(_part, 1)(rng)
    if rng.random() < 0.2:
        message[rng.choice(("name", "tool_calls", "tool_call_id", "content", "refusal"))] = junk(
            rng
        )
    return message


_TOKEN_ID = whole_number(0, VOCAB_SIZE - 1)
_TOKEN_IDS = _some(_TOKEN_ID, 1, 20)
_PROMPT = either(_one_of("a", "Once upon a time"), text)
_FEW = whole_number(1, 4)


def _biases(rng: Random) -> dict[str, float]:
    return {
        str(_TOKEN_ID(rng)): rng.choice((-100, 100, 0.5, -1e-3)) for _ in range(rng.randint(0, 3))
    }


def _parameters(rng: Random) -> dict[str, Any]:
    names = (rng.choice((*TRITON_FIELDS, text(rng))) for _ in range(rng.randint(0, 2)))
    return {name: GOOD.get(name, junk)(rng) for name in names}


def _sampling_parameters(rng: Random) -> str:
    return _object_text(_fields(rng, (), protocol.PARAMETER_KEYS, GOOD))


_FLAGS = (spec.name for spec in protocol.INPUTS if spec.datatype == "BOOL")
GOOD: dict[str, Draw] = dict.fromkeys(
    (*_FLAGS, protocol.CLIP_MAX_TOKENS, protocol.ADD_SPECIAL_TOKENS), boolean
) | {
    "model": _one_of(protocol.MODEL_NAME),
    "prompt": either(_PROMPT, _PROMPT, _TOKEN_IDS, _some(_PROMPT), _some(_TOKEN_IDS)),
    "n": whole_number(1, 3),
    "stream_options": _one_of({}, {"include_usage": True}, {"include_usage": False}, None),
    "max_completion_tokens": _FEW,
    "response_format": _FORMATS,
    "top_logprobs": whole_number(0, 3),
    "input": either(text, _some(either(_message, _item), 1)),
    "max_output_tokens": _FEW,
    "include": _one_of([], ["message.output_text.logprobs"]),
    "reasoning": _one_of({}, {"effort": "low"}, {"effort": "none", "summary": "auto"}),
    "text": lambda rng: {"format": _FORMATS(rng)},
    "store": boolean,
    "stop_sequences": _some(text),
    "system": either(text, _some(_part)),
    "thinking": _one_of({"type": "enabled", "budget_tokens": 9}, {"type": "disabled"}, {}),
    "output_config": _one_of({}, {"format": {"type": "json_schema", "schema": _SCHEMA}}),
    "tokens": _TOKEN_IDS,
    protocol.RETURN_TOKEN_STRS: boolean,
    "echo": boolean,
    "parameters": _parameters,
    protocol.TEXT_INPUT: _PROMPT,
    protocol.INPUT_IDS: _TOKEN_IDS,
    protocol.OUTPUT_IDS_SO_FAR: _TOKEN_IDS,
    protocol.MESSAGES: _some(_message, 1),
    protocol.WATCH_INTERVAL_MS: whole_number(40, 10_010),
    protocol.TASK: _one_of(*protocol.TASKS, "sing"),
    protocol.MAX_TOKENS: _FEW,
    protocol.MIN_TOKENS: whole_number(0, 4),
    protocol.TEMPERATURE: _between(0.0, 2.0),
    protocol.TOP_P: _between(0.01, 1.0),
    protocol.TOP_K: whole_number(-1, 50),
    protocol.REPETITION_PENALTY: _between(0.01, 2.0),
    protocol.PRESENCE_PENALTY: _between(-2.0, 2.0),
    protocol.FREQUENCY_PENALTY: _between(-2.0, 2.0),
    protocol.SEED: whole_number(0, protocol.MAX_SEED),
    protocol.STOP_WORDS: _some(text),
    protocol.STOP: either(text, _some(text)),
    protocol.STOP_TOKEN_IDS: either(_TOKEN_ID, _TOKEN_IDS),
    protocol.LOGIT_BIAS: _biases,
    protocol.MIN_P: _between(0.0, 1.0),
    protocol.ALLOWED_TOKEN_IDS: _TOKEN_IDS,
    protocol.BAD_WORDS: _some(text),
    protocol.TRUNCATE_PROMPT_TOKENS: either(_one_of(-1), whole_number(1, 300)),
    protocol.SKIP_SPECIAL_TOKENS: boolean,
    protocol.LOGPROBS: either(boolean, whole_number(0, 5)),
    protocol.PROMPT_LOGPROBS: whole_number(0, 5),
    protocol.STRUCTURED_OUTPUT: _FORMS,
    protocol.TOOLS: _some(_one_of(*_TOOLS)),
    "tool_choice": _one_of(
        "auto", "none", "required", {"type": "function", "function": {"name": "f"}}
    ),
    "parallel_tool_calls": boolean,
    "reasoning_effort": _one_of("low", "high"),
    protocol.CHAT_TEMPLATE_KWARGS: _one_of({}, {"enable_thinking": False}, {"messages": []}),
    **dict.fromkeys((protocol.ADD_GENERATION_PROMPT, protocol.CONTINUE_FINAL_MESSAGE), boolean),
    protocol.PRIORITY: whole_number(-3, 3),
    **dict.fromkeys((protocol.TTFT_SLO_MS, protocol.TPOT_SLO_MS), _between(1e-3, 1e9)),
    protocol.TENANT: _one_of("", "acme", "é" * 128),
    protocol.SESSION_ID: _one_of("", "s1", "s2", "é" * 128),
    protocol.CACHE_SALT: _one_of("a", "b", "é" * 128),
    protocol.REQUEST_ID: text,
    protocol.SAMPLING_PARAMETERS: _sampling_parameters,
}
"""Draws a valid value, by the field's name in any of the APIs."""
TENSORS: dict[str, Draw] = {
    protocol.MESSAGES: lambda rng: json.dumps(GOOD[protocol.MESSAGES](rng)),
    **dict.fromkeys((protocol.LOGIT_BIAS, protocol.STRUCTURED_OUTPUT), text),
    protocol.TOOLS: lambda rng: json.dumps(GOOD[protocol.TOOLS](rng)),
    protocol.CHAT_TEMPLATE_KWARGS: lambda rng: json.dumps(GOOD[protocol.CHAT_TEMPLATE_KWARGS](rng)),
}
"""Fields whose valid values differ between Triton and the gateway."""


# --- JSON ---------------------------------------------------------------------------------------

_Fields = list[tuple[str, str]]


def mostly(rng: Random, one_in: int = 12) -> bool:
    return rng.randrange(one_in) > 0


def _json(rng: Random, draw: Draw) -> str:
    return json.dumps(draw(rng), ensure_ascii=boolean(rng))


def any_json(rng: Random) -> str:
    return rng.choice(_ODD_JSON) if boolean(rng) else _json(rng, junk)


def _fields(
    rng: Random, required: Sequence[str], known: Sequence[str], good: Mapping[str, Draw]
) -> _Fields:
    """Names with the JSON of their values: most valid, some random, some given twice."""
    names = [name for name in required if mostly(rng, 20)] + rng.choices(known, k=rng.randint(0, 4))
    found = [
        (name, _json(rng, good.get(name, junk)) if mostly(rng, 8) else any_json(rng))
        for name in names
    ]
    if not mostly(rng):
        found.append((text(rng), any_json(rng)))
    return found


def _object_text(fields: _Fields) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields) + "}"


def draw_body(
    rng: Random, required: Sequence[str], known: Sequence[str], good: Mapping[str, Draw]
) -> bytes:
    # Few tokens by default. Of two values of one name, readers take the last.
    fields = [(protocol.MAX_TOKENS, "4"), *_fields(rng, required, known, good)]
    body = _object_text(fields).encode("utf-8", "surrogatepass")
    if mostly(rng):
        return body
    place = rng.randint(0, len(body))
    junk = rng.randbytes(rng.randint(0, 4))
    return rng.choice(
        (
            *(
                b"",
                body[:place],
                b"\xef\xbb\xbf" + body,
                body + junk,
                junk,
                body * 2,
                b"[%b]" % body,
            ),
            body[:place] + junk + body[place:],
            body.decode("utf-8", "replace").encode("utf-16"),
        )
    )
