"""Thousands of requests, good, bad and absurd, over the gateway and Triton's HTTP and gRPC.

`make endurance` sends 10,000, `make test` some hundreds. A failure shows the request and its
number, from which ``draw_request`` draws it again.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import grpc
from fastserve_backend.serving.launch import TritonServer
from fuzz_exchange import CLOSED, LATE, Outcome, Sender
from fuzzed_grpc import TRITON_GRPC, GrpcCall
from fuzzed_http import GATEWAY, REQUIRED, TRITON_HTTP, HttpRequest
from fuzzed_requests import Request, draw_request
from google.protobuf.message import DecodeError
from running_gateway import RunningGateway
from running_server import rank_pid
from serving_client import generate, wait_until_idle
from tritonclient.grpc import service_pb2

SEED = 1
NUM_SHORT, NUM_LONG = 400, 10_000
NUM_WORKERS = 16
MAX_MESSAGE_CHARS = 1000
NUM_SHOWN = 10
FIXED_REQUEST = {"text_input": "The queue was long", "max_tokens": 16, "temperature": 0.0}
FAULTS_IN_LOGS = re.compile("Traceback|unexpectedly|internal error|never retrieved|Signal", re.I)
FAULTS_IN_MESSAGES = re.compile(r"internal error|Traceback|\.py\b")

# The codes in docs/gateway.md, except those for bad keys, slow clients and missing servers.
GATEWAY_STATUSES = {200, 400, 403, 404, 405, 413, 415, 431}
# Triton answers 501 to infer for a model that streams.
TRITON_STATUSES = {200, 400, 403, 404, 405, 501}
# It answers 500 where it cannot parse a body itself.
TRITONS_OWN_500 = re.compile("parse|JSON|non-object")
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
UNREADABLE = "Unable to parse request"
"""gRPC's own words for a malformed message, with the code INTERNAL."""
GRPC_CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAVAILABLE"}
# The last events of streams that end without ``[DONE]``.
ENDS = ("response.completed", "response.incomplete", "message_stop")
# Errors that belong to no field.
OF_NO_PATH = ("Invalid HTTP request", "CONNECT")
OF_PROMPT = "prompt is too long: "
"""Words that clients of Anthropic's API look for."""
OF_WHOLE_BODY = (
    "the body is not valid JSON",
    "the body must be",
    "the body must have at most ",
    *OF_NO_PATH,
)


def test_each_is_answered_and_nothing_is_left(
    chatty_server: TritonServer,
    chatty_gateway: RunningGateway,
    chatty_log_path: Path,
    is_long: bool,
    record_property: Callable[[str, object], None],
) -> None:
    number = NUM_LONG if is_long else NUM_SHORT
    endpoints, runtime = chatty_server.endpoints, chatty_server.runtime
    answer = generate(endpoints.grpc_url, **FIXED_REQUEST).token_ids
    processes = {chatty_server.pid, runtime.stub_pid(), rank_pid(runtime)}
    logs = {path: path.stat().st_size for path in (chatty_log_path, chatty_gateway.log_path)}

    began_s = time.monotonic()
    requests = [draw_request(SEED, index) for index in range(number)]
    urls = {GATEWAY: chatty_gateway.url, TRITON_HTTP: endpoints.http_url}
    with (
        grpc.insecure_channel(endpoints.grpc_url) as channel,
        ThreadPoolExecutor(NUM_WORKERS) as pool,
    ):
        exchanges = list(zip(requests, pool.map(Sender(urls, channel).send, requests), strict=True))
    seconds = time.monotonic() - began_s

    faults = [
        f"request {index} of seed {SEED}: {fault}\n  {sent}"[:3000] + f"\n  {outcome}"[:1000]
        for index, (sent, outcome) in enumerate(exchanges)
        if (fault := fault_of(sent, outcome))
    ]
    assert not faults, f"{len(faults)} faults, such as\n" + "\n".join(faults[:NUM_SHOWN])
    # No process was restarted.
    assert processes == {chatty_server.pid, runtime.stub_pid(), rank_pid(runtime)}
    assert chatty_gateway.process.poll() is None
    wait_until_idle(endpoints)
    assert generate(endpoints.grpc_url, **FIXED_REQUEST).token_ids == answer
    for path, size in logs.items():
        new = path.read_bytes()[size:].decode(errors="replace")
        assert not FAULTS_IN_LOGS.search(new), new

    record_property("requests", number)
    for service in (GATEWAY, TRITON_HTTP, TRITON_GRPC):
        statuses = Counter(outcome.status for sent, outcome in exchanges if sent.service == service)
        counts = (f"{status} × {count}" for status, count in statuses.most_common())
        record_property(service, ", ".join(counts))
    record_property("slowest, s", round(max(outcome.seconds for _, outcome in exchanges), 2))
    record_property("all, s", round(seconds))


# --- what is wrong with an answer; empty if nothing is ------------------------------------------


def fault_of(request: Request, outcome: Outcome) -> str:
    if outcome.status == LATE:
        return "it is not answered"
    if isinstance(request, GrpcCall):
        return _fault_over_grpc(request, outcome)
    if outcome.status == CLOSED:
        return "it is not answered" if request.is_framed else ""
    try:
        if request.service == GATEWAY:
            return _fault_of_gateway(request, outcome)
        return _fault_of_triton(request, outcome)
    except ValueError as error:
        return f"what is no JSON: {error}"


def _fault_over_grpc(request: GrpcCall, outcome: Outcome) -> str:
    if outcome.status not in GRPC_CODES and outcome.messages[-1] != UNREADABLE:
        return "its status"
    if any(FAULTS_IN_MESSAGES.search(message) for message in outcome.messages):
        return "its message"
    # gRPC reads nothing after a malformed message.
    least = len(list(takewhile(_is_readable, request.messages)))
    if outcome.status == "OK" and not outcome.was_watched and outcome.num_responses < least:
        return "fewer answers than requests"
    return ""


def _is_readable(message: bytes) -> bool:
    try:
        service_pb2.ModelInferRequest.FromString(message)
    except DecodeError:
        return False
    return True


def _fault_of_triton(request: HttpRequest, outcome: Outcome) -> str:
    if request.method == "HEAD":
        return "" if outcome.status in TRITON_STATUSES else "its status"
    if _may_be_no_unicode(request.payload):
        # Triton quotes names and ids byte by byte as they came.
        outcome = replace(outcome, body=outcome.body.decode(errors="replace").encode())
    if outcome.status != 200:
        if not (outcome.body or request.is_framed):
            return ""
        message = _answers(outcome)[0]["error"]
        if outcome.status not in TRITON_STATUSES and not TRITONS_OWN_500.search(message):
            return "its status"
        return "its message" if FAULTS_IN_MESSAGES.search(message) else ""
    if "generate" in request.path:
        _answers(outcome)
    return ""


def _may_be_no_unicode(text: bytes) -> bool:
    """Whether it is invalid UTF-8, or has surrogates that JSON escapes."""
    try:
        return ESCAPED_SURROGATE.search(text.decode()) is not None
    except UnicodeDecodeError:
        return True


def _fault_of_gateway(request: HttpRequest, outcome: Outcome) -> str:
    if outcome.status not in GATEWAY_STATUSES:
        return "its status"
    if request.method == "HEAD" or (outcome.status == 200 and request.path not in REQUIRED):
        return ""
    answers = _answers(outcome)
    errors = [one["error"] for one in answers if one is not None and one.get("error")]
    if (outcome.status == 200) != (not errors or len(answers) > 1):
        return "status and body disagree"
    for error in errors:
        has_path = not error["message"].startswith(OF_NO_PATH)
        is_anthropic = has_path and request.path.startswith("/v1/messages")
        form = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
        if set(error) != form or not isinstance(error["type"], str):
            return "the form of its error"
        if len(error["message"]) > MAX_MESSAGE_CHARS:
            return "a long message"
        if outcome.status == 400 and request.path in REQUIRED and not _is_named(error, request):
            return "no field is named"
    if outcome.status == 200 and "event-stream" in outcome.content_type:
        is_whole = answers[-1] is None or answers[-1].get("type") in ENDS
        return "" if is_whole or errors else "a stream without an end"
    return ""


def _is_named(error: dict[str, Any], request: HttpRequest) -> bool:
    """Whether the request has, or should have, the field ``param``."""
    if error["message"].startswith(OF_WHOLE_BODY):
        return error.get("param") is None
    if "param" not in error and error["message"].startswith(OF_PROMPT):
        return True
    # Anthropic's errors have no parameter, but their messages begin with it.
    named = error["param"] if "param" in error else error["message"].partition(": ")[0]
    if named is None:
        return False
    root = re.split(r"[.\[]", named)[0]
    return root in REQUIRED[request.path] or root.encode() in request.body


def _answers(outcome: Outcome) -> list[Any]:
    """The parsed JSON of a body, or of each of its events; None for ``[DONE]``. Raises
    ValueError."""
    return [None if event == b"[DONE]" else _strict_json(event) for event in _events(outcome)]


def _events(outcome: Outcome) -> list[bytes]:
    if "event-stream" not in outcome.content_type:
        return [outcome.body]
    lines = outcome.body.split(b"\n")
    return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


def _strict_json(text: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in {text[:1000]!r}")

    return json.loads(text.decode(), parse_constant=refuse)
