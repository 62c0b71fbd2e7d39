"""What the load test needs of a server, whichever protocol it speaks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Request:
    """One job as a server gets it. Decoding is greedy."""

    prompt: str | list[int]
    """Text or token ids."""
    max_tokens: int
    exact: bool
    """Exactly ``max_tokens`` tokens: end tokens do not end the answer."""
    chat: bool = False
    """The text is a user's message, for the model's chat template."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation of a chat."""
        assert self.chat
        assert isinstance(self.prompt, str)
        return [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client saw of a job that ended well. Times are those of ``time.monotonic``."""

    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int
    queued_s: float | None = None
    """From the arrival at the server to the first iteration; ``None``: the server does not say."""
    num_preemptions: int | None = None


class Connection(Protocol):
    """One server during a load test; any number of requests may be under way."""

    async def check(self) -> None:
        """Returns once the server takes requests for the model.

        Raises:
            ClientError: it does not, and why.
        """

    async def send(self, request: Request, timeout_s: float) -> Answer:
        """One request, to its end. Cancelling the task cancels it at the server.

        Raises:
            ClientError: the typed error of a job without a whole answer.
        """

    async def close(self) -> None:
        """What is still under way is cancelled."""


def without_credentials(url: str) -> str:
    """Drops ``USER:PASSWORD@``, which a URL may have for a proxy."""
    return re.sub(r"://[^/]*@", "://", url)


@dataclass(frozen=True, slots=True)
class Target:
    """A server that a user named."""

    label: str
    """In tables and figures."""
    url: str
    """``grpc://HOST:PORT``, or the base URL of an OpenAI API without a slash at its end."""
    model: str | None
    """Its name there; ``None``: find out."""

    @classmethod
    def parse(cls, text: str, model: str | None = None) -> Target:
        """Reads ``[NAME=]URL``; without a name the URL is the name.

        Raises:
            InvalidRequest: the URL cannot be understood.
        """
        match = re.fullmatch(r"(?:(?P<name>[^=/:?]+)=)?(?P<url>.+)", text)
        if match is None:
            raise InvalidRequest(f"url: got {text!r}; must be like grpc://127.0.0.1:8001")
        scheme, separator, rest = match["url"].rstrip("/").partition("://")
        if scheme.lower() in ("http", "https"):
            # Where there is no path, it is the one that all servers of this API have.
            url = f"{scheme.lower()}://{rest}" + ("" if "/" in rest else "/v1")
        else:
            url = str(Endpoint.parse(scheme + separator + rest))
        return cls(match["name"] or without_credentials(url), url, model)

    @property
    def shown_url(self) -> str:
        """For people and reports."""
        return without_credentials(self.url)

    @property
    def is_openai(self) -> bool:
        return self.url.startswith("http")

    def connect(self, api_key: str | None) -> Connection:
        """Connects to nothing yet; needs a running event loop."""
        if self.is_openai:
            from fastserve_bench.openai_connection import OpenAIConnection

            return OpenAIConnection(self.url, self.model, api_key)
        from fastserve_bench.triton_connection import TritonConnection

        return TritonConnection(self.url, self.model)
