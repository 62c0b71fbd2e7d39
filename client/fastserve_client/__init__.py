"""Client of the Triton model ``fastserve``. It needs neither torch nor the server's package.

    from fastserve_client import FastServeClient

    with FastServeClient("grpc://127.0.0.1:8001") as client:
        for chunk in client.stream("Once upon a time", max_tokens=32):
            print(chunk.text, end="", flush=True)

Names are loaded on first use, because the server imports ``fastserve_client.protocol`` and must not
load a client with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastserve_client.aio_client import AsyncFastServeClient, AsyncTokenStream
    from fastserve_client.aio_watch import AsyncEngineWatch
    from fastserve_client.client import FastServeClient, TokenStream
    from fastserve_client.endpoint import DEFAULT_HTTP_URL, DEFAULT_URL, Endpoint
    from fastserve_client.engine_state import EngineState
    from fastserve_client.errors import (
        ClientError,
        ConnectionFailed,
        ContextLengthExceeded,
        InvalidRequest,
        ModelLost,
        RequestCancelled,
        RequestTimeout,
        ServerError,
        ServerFailed,
        ServerOverloaded,
        ServerUnavailable,
    )
    from fastserve_client.model_description import ModelDescription
    from fastserve_client.options import (
        ChatTemplateOptions,
        Message,
        Prompt,
        RequestOptions,
        SamplingOptions,
        ServiceOptions,
    )
    from fastserve_client.results import (
        Chunk,
        Completion,
        PerfMetrics,
        PromptToken,
        Tokenization,
        TokenLogprob,
    )

__all__ = [
    "FastServeClient",
    "TokenStream",
    "AsyncFastServeClient",
    "AsyncTokenStream",
    "AsyncEngineWatch",
    "EngineState",
    "ModelDescription",
    "Tokenization",
    "Prompt",
    "Message",
    "RequestOptions",
    "SamplingOptions",
    "ServiceOptions",
    "ChatTemplateOptions",
    "Chunk",
    "Completion",
    "TokenLogprob",
    "PromptToken",
    "PerfMetrics",
    "DEFAULT_URL",
    "DEFAULT_HTTP_URL",
    "Endpoint",
    "ClientError",
    "InvalidRequest",
    "ContextLengthExceeded",
    "ServerUnavailable",
    "ServerOverloaded",
    "ConnectionFailed",
    "ModelLost",
    "RequestTimeout",
    "RequestCancelled",
    "ServerError",
    "ServerFailed",
]

_MODULES = {
    "FastServeClient": "client",
    "TokenStream": "client",
    "AsyncFastServeClient": "aio_client",
    "AsyncTokenStream": "aio_client",
    "AsyncEngineWatch": "aio_watch",
    "EngineState": "engine_state",
    "ModelDescription": "model_description",
    "Prompt": "options",
    "Message": "options",
    "RequestOptions": "options",
    "SamplingOptions": "options",
    "ServiceOptions": "options",
    "ChatTemplateOptions": "options",
    "DEFAULT_URL": "endpoint",
    "DEFAULT_HTTP_URL": "endpoint",
    "Endpoint": "endpoint",
    "Chunk": "results",
    "Completion": "results",
    "TokenLogprob": "results",
    "PromptToken": "results",
    "Tokenization": "results",
    "PerfMetrics": "results",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    return getattr(module, name)
