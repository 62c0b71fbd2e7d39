"""Schemas that libraries write for usual shapes are taken, of tools and of answers.

Pydantic's are made here. Those of other languages are in ``library_schemas``, beside the programs
that made them, whose heads have the commands.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from fastserve_backend.grammars.compiler import Compiler
from fastserve_chat.answer_format import AnswerFormat
from fastserve_chat.tool import Tool
from fastserve_chat.tool_formats import TOOL_FORMATS
from fastserve_client.schema_formats import left_out_keywords
from fastserve_gateway.body import parse_body
from fastserve_gateway.schemas import ChatRequest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, HttpUrl, SecretStr, create_model
from pydantic_core import to_json

DIRECTORY = Path(__file__).parent / "library_schemas"
EOS = 2
TOKENS = [b""] * 4 + [bytes([value]) for value in range(256)]


class Mode(enum.Enum):
    READ = "read"
    WRITE = "write"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    value: str
    children: list[Tree] = []


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: str


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: str


class Point(NamedTuple):
    x: int
    y: str = "a"


def model(name: str, **fields: Any) -> type[BaseModel]:
    """A type alone is a required field."""
    given = {key: one if isinstance(one, tuple) else (one, ...) for key, one in fields.items()}
    return create_model(name, **given)


MODELS = (
    *(Tree, Strict, Loose),
    model("empty"),
    model("plain", a=str, b=int, c=float, d=bool),
    model("optional", a=str | None, b=(int | None, None)),
    model("default", a=(int, 5), b=(list[str], Field(default_factory=list))),
    model("enum", a=Mode, b=Level),
    model("literal", a=Literal["x", "y"], b=Literal[1], c=Literal[None, True]),
    model("union", a=int | str | list[int]),
    model("discriminated", a=Annotated[Cat | Dog, Field(discriminator="kind")]),
    model("list", a=Annotated[list[str], Field(min_length=1, max_length=4)]),
    model("tuple", a=tuple[int, str], b=tuple[int, ...], c=Point),
    model("dict", a=dict[str, int], b=dict[Mode, int], c=dict[int, str], d=dict[uuid.UUID, str]),
    model("keys", a=dict[Literal["u", "v"], str], b=dict[datetime.date, int]),
    model("key lengths", a=dict[Annotated[str, Field(min_length=2)], int]),
    model("key patterns", a=dict[Annotated[str, Field(pattern="^a+$")], int]),
    model("nested", a=Cat, b=list[dict[str, list[int | None]]]),
    model("bounds", a=Annotated[int, Field(ge=0, le=9)], b=Annotated[float, Field(gt=0, lt=1)]),
    model("multiple", a=Annotated[int, Field(multiple_of=5)]),
    model("decimal", a=decimal.Decimal),
    model("times", a=datetime.datetime, b=datetime.date, c=datetime.time, d=datetime.timedelta),
    model("formats", a=uuid.UUID, b=AnyUrl, c=HttpUrl, d=pathlib.Path, e=ipaddress.IPv4Address),
    model("secrets", a=SecretStr, b=bytes),
    model("pattern", a=Annotated[str, Field(pattern=r"^\d{3}-[a-z]+$")]),
    model("any", a=Any, b=object),
    model("set", a=set[str], b=frozenset[int], c=Annotated[set[str], Field(min_length=1)]),
    model("described", a=(str, Field(description="d", title="t", examples=["x"], alias="A"))),
    model("extra", a=(str, Field(json_schema_extra={"readOnly": True, "x-order": 1}))),
)


def stored() -> Iterator[Any]:
    for path in sorted(DIRECTORY.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, schema in found["schemas"].items():
            yield pytest.param(schema, id=f"{found['generator']}: {name}")


def of_pydantic() -> Iterator[Any]:
    for one in MODELS:
        for mode in ("validation", "serialization"):
            schema = one.model_json_schema(mode=mode)  # type: ignore[arg-type]
            yield pytest.param(schema, id=f"pydantic: {one.__name__}, {mode}")


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENS, (EOS,))


@pytest.mark.parametrize("schema", [*stored(), *of_pydantic()])
def test_it_is_taken(compiler: Compiler, schema: dict[str, Any]) -> None:
    function = {"name": "f", "parameters": schema, "strict": True}
    body = {"model": "m", "messages": [{"role": "user", "content": ""}],
            "tools": [{"type": "function", "function": function}]}  # fmt: skip
    parse_body(to_json(body), ChatRequest)
    form = AnswerFormat(
        tool_format=TOOL_FORMATS["hermes"], tools=(Tool("f", schema, strict=True),), needs_call=True
    )
    grammar = form.grammar()
    assert grammar is not None
    compiler.compile("grammar", grammar)
    compiler.compile("json_schema", json.dumps(schema))


def test_there_are_schemas_of_each_library() -> None:
    names = {path.stem for path in DIRECTORY.glob("*.json")}
    assert names == {"go", "typescript", "zod"}


NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}


@pytest.mark.parametrize(
    ("names", "answers"),
    [
        ({"enum": ["a", "b.c"]}, {'{"a":1,"b.c":2}': True, '{"bxc":1}': False, '{"a":""}': False}),
        ({"const": "a"}, {'{"a":1}': True, '{"b":1}': False}),
        ({"$ref": "#/$defs/names"}, {'{"a":1}': True, '{"c":1}': False}),
        ({"pattern": "^x+$"}, {'{"xx":1}': True, '{"xy":1}': False}),
        ({"type": "string", "minLength": 2}, {'{"ab":1}': True, '{"a":1}': False}),
        ({"maxLength": 1}, {'{"a":1}': True, '{"ab":1}': False}),
    ],
)
def test_names_of_a_map(
    compiler: Compiler, names: dict[str, Any], answers: dict[str, bool]
) -> None:
    schema = {**NUMBERS, "propertyNames": names, "$defs": {"names": {"enum": ["a", "b"]}}}
    assert left_out_keywords(schema, schema) == []
    matcher = compiler.compile("json_schema", json.dumps(schema))
    for answer, is_valid in answers.items():
        ids = [4 + byte for byte in answer.encode()]
        assert (matcher.validate_tokens([*ids, EOS]) > len(ids)) == is_valid, answer


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        ({**NUMBERS, "propertyNames": {"format": "uuid"}}, ["propertyNames"]),
        ({**NUMBERS, "propertyNames": {"enum": ["a"]}, "properties": {"a": {}}}, ["propertyNames"]),
        ({**NUMBERS, "propertyNames": {"$ref": "#/none"}}, ["propertyNames"]),
        ({**NUMBERS, "propertyNames": {"type": "string"}}, []),
        ({"type": "array", "uniqueItems": False}, []),
    ],
)
def test_what_nothing_enforces_is_named(
    compiler: Compiler, schema: dict[str, Any], names: list[str]
) -> None:
    compiler.compile("json_schema", json.dumps(schema))
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": ""}],
        "response_format": {"type": "json_object", "schema": schema},
    }
    ignored = parse_body(to_json(body), ChatRequest).unknown_fields()
    assert ignored == [f"response_format.schema.{name}" for name in names]
