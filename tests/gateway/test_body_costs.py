"""What a body may cost: memory for each field of each schema, and time of the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import UnionType
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints

import httpx2
import pytest
from fastserve_client.errors import InvalidRequest
from fastserve_gateway.app import create_app
from fastserve_gateway.body import check_number_of_jobs, parse_body
from fastserve_gateway.body_threads import NUM_THREADS
from fastserve_gateway.chat import ChatAnswer
from fastserve_gateway.chat_message import ChatMessage
from fastserve_gateway.completions import CompletionAnswer
from fastserve_gateway.errors import ApiError, from_client_error, from_validation
from fastserve_gateway.json_size import (
    MAX_CONTAINERS,
    MAX_FIELD_BYTES,
    MAX_MEMBERS,
    MAX_VALUES,
    SMALL_BODY_BYTES,
    check_number_of_values,
)
from fastserve_gateway.messages_schema import ConversationRequest, MessagesRequest, Thinking
from fastserve_gateway.model_formats import DescribedFormats, FormatNames, ModelFormats
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    JSONSchema,
    ResponseFormat,
)
from fastserve_gateway.strict_fields import Body
from fastserve_gateway.tokenization import DetokenizeRequest, TokenizeRequest
from fastserve_gateway.tool_fields import FunctionDefinition, FunctionTool
from lone_gateway import settings
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from typing_extensions import is_typeddict

DEADLINE_S = 120.0
NUM_BYTES = 100_000
# The factor in docs/deploy.md.
MAX_BYTES_PER_BYTE = 45
# One for each field that is missing, and for each member of a union; not one for each value.
MAX_ERRORS = 8
# CPU time of the loop's own thread, which other programs do not lengthen.
MAX_TURN_S = 0.05

FORMATS = ModelFormats.of("{{ messages }}{{ tools }} <tool_call> /no_think /think", FormatNames())

# --- memory ---------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "Hi"}]
VALID: dict[Any, dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "Hi"},
    ChatRequest: {"model": "m", "messages": HI},
    ConversationRequest: {"model": "m", "messages": HI},
    MessagesRequest: {"model": "m", "messages": HI, "max_tokens": 5},
    ResponsesRequest: {"model": "m", "input": "Hi"},
    TokenizeRequest: {"messages": HI},
    DetokenizeRequest: {"tokens": [1]},
    ChatMessage: HI[0],
    FunctionTool: {"type": "function", "function": {"name": "f"}},
    FunctionDefinition: {"name": "f"},
    ResponseFormat: {"type": "json_object"},
    JSONSchema: {"name": "a", "schema": {}},
    Thinking: {"type": "enabled"},
}
"""The fields that a body, or a part of it, must have."""
SCHEMAS = [schema for schema in VALID if isinstance(schema, type) and issubclass(schema, Body)]

Path = tuple[str | int, ...]


def test_all_schemas_are_here() -> None:
    def leaves(schema: type[Body]) -> Iterator[type[Body]]:
        for inner in schema.__subclasses__():
            yield inner
            yield from leaves(inner)

    required = {schema for schema in leaves(Body) if not schema.__name__.startswith("_")}
    assert {one.__name__ for one in required} - {"RequestBody", "TaskBody"} == {
        schema.__name__ for schema in SCHEMAS
    }


def places(annotation: Any, path: Path = ()) -> Iterator[tuple[Path, Callable[[Any], Any]]]:
    """The paths of all fields in a value of this type; for each what makes such a value, which is
    valid but for a given value there."""
    yield path, lambda value: value
    if get_origin(annotation) in (Annotated, NotRequired, Union, UnionType):
        one_type = get_origin(annotation) is Annotated
        for one in get_args(annotation)[: 1 if one_type else None]:
            yield from places(one, path)
    elif get_origin(annotation) is list:
        for found, make in places(get_args(annotation)[0], (*path, 0)):
            yield found, lambda value, make=make: [make(value)]
    for name, inner in named_fields(annotation).items():
        rest = VALID.get(annotation, {})
        for found, make in places(inner, (*path, name)):
            yield found, lambda value, name=name, make=make, rest=rest: {**rest, name: make(value)}


def named_fields(annotation: Any) -> dict[str, Any]:
    if is_typeddict(annotation):
        return get_type_hints(annotation, include_extras=True)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        return {field.alias or name: field.annotation for name, field in fields.items()}
    return {}


def many(part: str) -> str:
    return "[" + ",".join([part] * (NUM_BYTES // (len(part) + 1))) + "]"


def many_names(value: str) -> str:
    size = NUM_BYTES // (len(value) + 9)
    return "{" + ",".join(f'"{number:05x}":{value}' for number in range(size)) + "}"


LARGE = {
    "numbers": many("1"),
    "large numbers": many("12345"),
    "texts": many('""'),
    "lists": many("[]"),
    "objects": many("{}"),
    "objects with a value": many('{"":1}'),
    "nested": many("[" * 150 + "]" * 150),
    "names": many_names("1"),
    "names of texts": many_names('""'),
    "names of objects": many_names("{}"),
    "names of deep objects": many_names('{"properties":{}}'),
    "properties": f'{{"type":"object","properties":{many_names("{}")}}}',
    "messages": many('{"role":"user","content":""}'),
    "messages of parts": many('{"role":"user","content":[{"type":"text","text":""}]}'),
    "messages of unknown fields": many('{"role":"user","content":"","x":{}}'),
    "parts": many('{"type":"text","text":""}'),
    "uses of tools": many(
        '{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"a","input":{"":1}}]}'
    ),
    "a use of a tool": (
        '[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"a","input":'
        + many_names("{}")
        + "}]}]"
    ),
    "items": many('{"type":"reasoning"}'),
    "tools": many('{"type":"function","function":{"name":"f"}}'),
    "text": json.dumps("x" * NUM_BYTES),
    "a long name": f'{{"{"x" * NUM_BYTES}":1}}',
}


def peak_bytes(work: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and the most memory that was taken meanwhile."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def large_values() -> dict[str, tuple[Any, int]]:
    """Each value, and the memory that it took to read it."""
    return {name: peak_bytes(lambda text=text: from_json(text)) for name, text in LARGE.items()}


def check(schema: type[Body], fields: dict[str, Any]) -> ApiError | None:
    """What the gateway does with the fields until it has jobs. Returns the refusal."""
    try:
        request: Any = schema.model_validate(fields)
        request.unknown_fields()
        make_jobs(request)
    except ValidationError as error:
        num_errors, refusal = error.error_count(), from_validation(error)
    except ApiError as error:
        return error
    except InvalidRequest as error:
        return from_client_error(error, {})
    else:
        return None
    assert num_errors <= MAX_ERRORS
    return refusal


def make_jobs(request: Any) -> None:
    if isinstance(request, CompletionRequest):
        check_number_of_jobs(request, max_jobs=128)
        CompletionAnswer(request).jobs({})
    elif not isinstance(request, DetokenizeRequest):
        chat = request if isinstance(request, ChatRequest) else request.chat
        chat = chat(()) if callable(chat) else chat
        if chat is not None:
            ChatAnswer(chat, FORMATS).jobs({})


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_no_field_takes_more_memory_than_is_planned_for(
    schema: type[Body], large_values: dict[str, tuple[Any, int]]
) -> None:
    found = dict(places(schema))
    found["unknown",] = lambda value: {**VALID[schema], "unknown": value}
    assert len(found) > len(VALID[schema])
    for path, make in found.items():
        for name, (value, read_bytes) in large_values.items():
            work = partial(check, schema, make(value))
            refusal, checked_bytes = peak_bytes(work)
            size = len(LARGE[name])
            assert read_bytes + checked_bytes < MAX_BYTES_PER_BYTE * size, (path, name)
            # The answer shows no more of what was sent than a few names.
            if refusal is not None:
                assert len(json.dumps(refusal.body)) < 2000, (path, name)


# --- numbers of values ----------------------------------------------------------------------------


def test_texts_may_have_any_characters() -> None:
    for text in ("[{," * MAX_VALUES, '\\"[' * MAX_CONTAINERS, "\\" * MAX_VALUES + "["):
        body = json.dumps({"model": "m", "prompt": text}).encode()
        assert parse_body(body, CompletionRequest).prompts == [text]


@pytest.mark.parametrize("pad", [0, 1, 2, 3])
def test_values_are_counted_outside_of_texts(pad: int) -> None:
    text = json.dumps('\\",[{"\\' + "x" * pad)
    most = b"[%b]" % b",".join([b'[{"a":%b}]' % text.encode()] * (MAX_CONTAINERS // 2 - 1))
    check_number_of_values(most)
    with pytest.raises(ValueError, match=f"at most {MAX_CONTAINERS} lists and objects"):
        check_number_of_values(most[:-1] + b",[[]]]")


def test_a_body_of_too_many_values_is_refused_before_it_is_read() -> None:
    limits = ((b"[]", MAX_CONTAINERS), (b'{":":":"', MAX_CONTAINERS), (b"1", MAX_VALUES))
    for part, limit in (*limits, (b'"":1', MAX_MEMBERS)):
        body = b'{"x":[%b' % b",".join([part] * (limit + 1))  # which is no JSON, too
        with pytest.raises(ApiError, match=f"^the body must have at most {limit} "):
            parse_body(body, ChatRequest)


def test_an_object_with_declared_fields_has_no_thousands_of_them() -> None:
    names = {str(number): 1 for number in range(2000)}
    valid = VALID[ChatRequest]
    for fields, param in (
        (valid | names, None),
        (valid | {"messages": [HI[0] | names]}, "messages.0"),
        (valid | {"response_format": names}, "response_format"),
    ):
        with pytest.raises(ApiError, match=r"got 200\d fields; at most 1024 ") as refused:
            parse_body(json.dumps(fields).encode(), ChatRequest)
        assert refused.value.body["error"]["param"] == param


def test_a_million_token_ids_are_taken() -> None:
    ids = [5] * (MAX_VALUES - 2)
    request = parse_body(json.dumps({"model": "m", "prompt": ids}).encode(), CompletionRequest)
    assert list(request.prompts[0]) == ids


# --- time of the event loop -----------------------------------------------------------------------

MB = 1_000_000


def long_paths(size: int) -> str:
    """A schema whose paths together would be as long as the square of its size."""
    children = ",".join(f'"{number:04x}":{{}}' for number in range(size // 22))
    outer = f'"{"x" * (size // 2)}":{{"properties":{{{children}}}}}'
    return f'{{"type":"object","properties":{{{outer}}}}}'


def many_parts(size: int) -> str:
    properties = ",".join(f'"{number:04x}":{{}}' for number in range(size // 10))
    return f'{{"type":"object","properties":{{{properties}}}}}'


def chat(fields: str, messages: str = '[{"role":"user","content":"Hi"}]') -> str:
    return f'{{"model":"fastserve","messages":{messages}{fields}}}'


def tools(parameters: str) -> str:
    function = f'{{"name":"f","strict":true,"parameters":{parameters}}}'
    return f',"tools":[{{"type":"function","function":{function}}}],"tool_choice":"required"'


def listed(part: str, size: int) -> str:
    return "[" + ",".join([part] * (size // (len(part) + 1))) + "]"


MESSAGE = '{"role":"user","content":""}'
ADVERSARIAL = {
    "token ids": ("/v1/completions", f'{{"model":"fastserve","prompt":{listed("123", MB)}}}'),
    "tokens": ("/detokenize", f'{{"tokens":{listed("123", MB)}}}'),
    "text": ("/v1/completions", f'{{"model":"fastserve","prompt":"{"é" * (MB // 2)}"}}'),
    "no JSON": ("/v1/completions", listed('""', MB)[:-1]),
    "lists": ("/v1/completions", f'{{"model":"fastserve","prompt":{listed("[1]", MB)}}}'),
    "wrong messages": ("/v1/chat/completions", chat("", listed("{}", MB))),
    "messages": ("/v1/chat/completions", chat("", listed(MESSAGE, 16_000 * 29))),
    "answers": ("/v1/chat/completions", chat(',"n":8', listed(MESSAGE, 100_000))),
    "calls": (
        "/v1/chat/completions",
        chat("", f'[{{"role":"assistant","tool_calls":[{{"x":{listed("1", MB)}}}]}}]'),
    ),
    "long paths": ("/v1/chat/completions", chat(tools(long_paths(MB)))),
    "shorter paths": ("/v1/chat/completions", chat(tools(long_paths(MAX_FIELD_BYTES // 2)))),
    "many parts": ("/v1/chat/completions", chat(tools(many_parts(MAX_FIELD_BYTES // 2)))),
    "a small body": ("/v1/chat/completions", chat(tools(many_parts(SMALL_BODY_BYTES - 200)))),
    "unknown names": (
        "/v1/chat/completions",
        chat("".join(f',"{number:x}":1' for number in range(MB // 9))),
    ),
    "input": ("/v1/responses", f'{{"model":"fastserve","input":{listed(MESSAGE, 16_000 * 29)}}}'),
    "blocks": (
        "/v1/messages",
        chat(',"max_tokens":1', f'[{{"role":"user","content":{listed(MESSAGE, MB)}}}]'),
    ),
    "counted": ("/v1/messages/count_tokens", chat("", listed(MESSAGE, 16_000 * 29))),
    "tokenized": ("/tokenize", chat(tools(many_parts(MAX_FIELD_BYTES // 2)))),
}


@pytest.fixture
def frozen() -> Iterator[None]:
    """The collector passes over the objects of other tests, which no gateway has."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@asynccontextmanager
async def gateway_without_server() -> AsyncIterator[httpx2.AsyncClient]:
    """A client of an application that runs on this event loop."""
    app = create_app(settings())
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app),
            base_url="http://127.0.0.1:9000",
            headers={"Content-Type": "application/json"},
            timeout=DEADLINE_S,
        ) as client,
    ):
        yield client


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_no_body_holds_up_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns_s: list[float] = []
    run = asyncio.Handle._run  # type: ignore[attr-defined]

    def timed_run(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        run(handle)
        turns_s.append(time.thread_time() - begin)

    async def current(self: DescribedFormats) -> ModelFormats:
        return FORMATS

    monkeypatch.setattr(asyncio.Handle, "_run", timed_run)
    monkeypatch.setattr(DescribedFormats, "current", current)
    path, body = ADVERSARIAL[name]

    async def post() -> httpx2.Response:
        async with gateway_without_server() as client:
            # The first request opens the connection to the server.
            await client.post("/v1/completions", content=b'{"model":"fastserve","prompt":"a"}')
            turns_s.clear()
            return await client.post(path, content=body.encode())

    answer = asyncio.run(post())
    assert answer.status_code in (400, 503)  # there is no server
    assert len(answer.content) < 1000
    assert max(turns_s) < MAX_TURN_S


def test_large_bodies_are_read_on_a_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are read at once."""
    readers: list[str] = []
    running: list[str] = []

    def parse(body: bytes, schema: Any) -> Any:
        running.append(threading.current_thread().name)
        assert len(running) <= NUM_THREADS + 1  # the loop's own thread
        readers.append(threading.current_thread().name)
        try:
            return parse_body(body, schema)
        finally:
            running.remove(threading.current_thread().name)

    monkeypatch.setattr("fastserve_gateway.body.parse_body", parse)

    async def read_all() -> list[int]:
        async with gateway_without_server() as client:
            bodies = [{"model": "m", "prompt": "a" * size} for size in [1 << 16] * 8 + [9]]
            posts = (client.post("/v1/completions", json=one) for one in bodies)
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    assert asyncio.run(read_all()) == [404] * 9  # there is no such model
    assert readers.count(threading.current_thread().name) == 1
    assert len([name for name in readers if name.startswith("body")]) == 8
