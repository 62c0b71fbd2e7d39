"""HTTP requests to the gateway and to Triton, most of them almost valid."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from fastserve_client import protocol
from fastserve_gateway.messages_schema import ConversationRequest, MessagesRequest
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import ChatRequest, CompletionRequest
from fastserve_gateway.strict_fields import Body
from fastserve_gateway.tokenization import DetokenizeRequest, TokenizeRequest
from fuzzed_values import GOOD, TENSORS, TRITON_FIELDS, boolean, draw_body, mostly, text

GATEWAY, TRITON_HTTP = "gateway", "Triton HTTP"

_OTHER_FIELDS = (
    "suffix",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "best_of",
    "guided_regex",
    "user",
    "parameters",
    "stop_words",
)
SCHEMAS: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": ConversationRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
REQUIRED = {
    "/v1/completions": ("model", "prompt"),
    "/v1/chat/completions": ("model", "messages"),
    "/v1/responses": ("model", "input", "max_output_tokens"),
    "/v1/messages": ("model", "messages", "max_tokens"),
    "/v1/messages/count_tokens": ("model", "messages"),
    "/tokenize": ("prompt",),
    "/detokenize": ("tokens",),
}
_MODEL = f"/v2/models/{protocol.MODEL_NAME}"
_GENERATE = (f"{_MODEL}/generate", f"{_MODEL}/generate_stream")


@dataclass(frozen=True)
class HttpRequest:
    service: str
    payload: bytes
    """Headers and body as they go over the wire."""
    is_framed: bool
    """Whether headers and body are whole and agree, so that the server must answer."""

    @property
    def method(self) -> str:
        return self.payload.split(b" ", 1)[0].decode("latin-1")

    @property
    def path(self) -> str:
        return self.payload.split(b" ", 2)[1].decode("latin-1")

    @property
    def body(self) -> bytes:
        return self.payload.partition(b"\r\n\r\n")[2]


def _gateway_body(rng: Random, path: str) -> bytes:
    return draw_body(rng, REQUIRED[path], (*SCHEMAS[path].model_fields, *_OTHER_FIELDS), GOOD)


def _triton_body(rng: Random) -> bytes:
    prompt = rng.choice((protocol.TEXT_INPUT, protocol.TEXT_INPUT, *protocol.PROMPTS))
    return draw_body(rng, (prompt,), (*TRITON_FIELDS, "parameters"), GOOD | TENSORS)


_CONTENT_TYPES = (
    "application/json; charset=utf-8",
    "text/plain",
    "",
    "\xff",
    "multipart/form-data",
)
_METHODS = (
    "GET",
    "PUT",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "CONNECT",
    "FOO",
    "post",
    "",
)
_OTHER_PATHS = {
    GATEWAY: (
        *("/v1/models", "/v1/models/fastserve", "/v1/models/x", "/health", "/metrics", "/live"),
        *(
            "/v1/embeddings",
            "/v1/completions/",
            "/v1/completions?x=%ff",
            "*",
            "http://a:b/v1/models",
        ),
    ),
    TRITON_HTTP: (
        *(
            "/v2",
            "/v2/health/ready",
            "/v2/models/stats",
            _MODEL,
            f"{_MODEL}/config",
            "/v2/models/x",
        ),
        *(f"{_MODEL}/infer", f"{_MODEL}/versions/1/infer", f"{_MODEL}/versions/9/generate", "*"),
        *("/v2/repository/index", "/v2/repository/models/fastserve/unload", "/v2/trace/setting"),
        *("/v2/systemsharedmemory/status", "/v2/cudasharedmemory/region/a/register", "/v2/logging"),
        *(f"{_MODEL}/versions/x/generate", f"{_MODEL}/generate?x=%ff", "/v2/models//generate"),
    ),
}


def draw_http_request(rng: Random) -> HttpRequest:
    service = GATEWAY if boolean(rng) else TRITON_HTTP
    path = rng.choice(tuple(SCHEMAS) if service == GATEWAY else _GENERATE)
    body = _gateway_body(rng, path) if service == GATEWAY else _triton_body(rng)
    method = "POST" if mostly(rng, 20) else rng.choice(_METHODS)
    content_type = "application/json" if mostly(rng, 20) else rng.choice(_CONTENT_TYPES)
    if not mostly(rng, 16):
        junk = rng.choice(("/", _MODEL, "/v1/models/", "")) + text(rng)
        path = rng.choice((*_OTHER_PATHS[service], junk))
    is_framed = mostly(rng)
    framing = f"Content-Length: {len(body)}\r\n"
    if not is_framed:
        framing, body = _odd_framing(rng, body)
    elif method != "POST" or not set(path) <= _PATH_CHARACTERS or not path.startswith("/"):
        is_framed = False
    line = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    head = f"{line}Content-Type: {content_type}\r\n{framing}\r\n"
    return HttpRequest(service, head.encode("utf-8", "surrogatepass") + body, is_framed)


_PATH_CHARACTERS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/_-.%?=")


def _odd_framing(rng: Random, body: bytes) -> tuple[str, bytes]:
    """Odd headers, and the body that goes with them."""
    size = len(body)
    length = f"Content-Length: {size}\r\n"
    chunked = "Transfer-Encoding: chunked\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
    part = "Inference-Header-Content-Length: "
    return rng.choice(
        (
            ("", body),
            (f"Content-Length: {size + 9}\r\n", body),
            (f"Content-Length: {size // 2}\r\n", body),
            (f"{length}Content-Length: {size + 1}\r\n", body),
            ("Content-Length: -1\r\n", body),
            ("Content-Length: 99999999999999999999\r\n", body),
            (f"{length}Host: evil.example\r\n", body),
            (f"{length}Expect: 100-continue\r\n", body),
            (f"{length}Content-Encoding: gzip\r\n", body),
            (f"{length}Upgrade: h2c\r\nConnection: Upgrade\r\n", body),
            (f"{length}{part}{size // 2}\r\n", body),
            (f"{length}{part}-7\r\n", body),
            (f"{length}{part}x\r\n", body),
            (length + "X: y\r\n" * 500, body),
            (f"{length}: y\r\nX\r\n\0: \0\r\n", body),
            (length + chunked, body),
            (chunked, chunks),
            (chunked, chunks[: size // 2]),
            (chunked, b"-1\r\n" + chunks),
            (chunked, b"f" * 18 + b"\r\n" + body),
        )
    )
