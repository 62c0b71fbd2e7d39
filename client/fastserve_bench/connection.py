"""What the load test needs of a server, for any protocol."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import InvalidRequest

from fastserve_bench.workload.service_class import NO_CLASS, ServiceClass


@dataclass(frozen=True, slots=True)
class Request:
    """A job as a server gets it. Decoding is greedy."""

    prompt: str | list[int]
    """Text or token ids."""
    max_tokens: int
    exact: bool
    """True: the answer has exactly ``max_tokens`` tokens, and end tokens do not end it."""
    chat: bool = False
    """True: the text is a user's message, for the model's chat template."""
    service: ServiceClass = NO_CLASS

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation of a chat."""
        assert self.chat
        assert isinstance(self.prompt, str)
        return [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """What the client saw of a successful job. Times are those of ``time.monotonic``."""

    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int
    queued_s: float | None = None
    """From arrival at the server to the first iteration; ``None``: the server does not say."""
    num_preemptions: int | None = None


class Connection(Protocol):
    """A connection to one server, with any number of running requests."""

    async def check(self) -> None:
        """Returns once the server takes requests for the model.

        Raises:
            ClientError: the server does not. The message says why.
        """

    async def send(self, request: Request, timeout_s: float) -> TimedAnswer:
        """Sends one request and returns its answer. Cancelling the task cancels the job.

        Raises:
            ClientError: the job has no whole answer.
        """

    async def close(self) -> None:
        """Cancels running requests."""


def without_credentials(url: str) -> str:
    """Drops ``USER:PASSWORD@``, which a URL may have for a proxy."""
    return re.sub(r"://[^/]*@", "://", url)


@dataclass(frozen=True, slots=True)
class Target:
    """A server that a user named."""

    label: str
    """Its name in tables and figures."""
    url: str
    """``grpc://HOST:PORT``, or the base URL of an OpenAI API without a slash at its end."""
    model: str | None
    """The model's name there; ``None``: ask the server."""

    @classmethod
    def parse(cls, text: str, model: str | None = None) -> Target:
        """Reads ``[NAME=]URL``. Without a name, the URL is the name.

        Raises:
            InvalidRequest: the URL cannot be understood.
        """
        match = re.fullmatch(r"(?:(?P<name>[^=/:?]+)=)?(?P<url>.+)", text)
        if match is None:
            raise InvalidRequest(f"url: got {text!r}; must be like grpc://127.0.0.1:8001")
        scheme, separator, rest = match["url"].rstrip("/").partition("://")
        if scheme.lower() in ("http", "https"):
            # Without a path, take the one that all servers of this API have.
            url = f"{scheme.lower()}://{rest}" + ("" if "/" in rest else "/v1")
        else:
            url = str(Endpoint.parse(scheme + separator + rest))
        return cls(match["name"] or without_credentials(url), url, model)

    @property
    def shown_url(self) -> str:
        """The URL for messages and reports."""
        return without_credentials(self.url)

    @property
    def is_openai(self) -> bool:
        return self.url.startswith("http")

    def connect(self, api_key: str | None) -> Connection:
        """Makes the connection, which connects to nothing yet. Needs a running event loop."""
        if self.is_openai:
            from fastserve_bench.openai_connection import OpenAIConnection

            return OpenAIConnection(self.url, self.model, api_key)
        from fastserve_bench.triton_connection import TritonConnection

        return TritonConnection(self.url, self.model)
