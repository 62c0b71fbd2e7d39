"""How the model's answers are read, and what its jobs need for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_chat.parts import PartReader
from fastserve_chat.plain import PlainReader
from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.options import Prompt, SamplingOptions

from fastserve_gateway.schemas import ChatRequest


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats of one model. A chat request becomes jobs by ``prompts`` and ``options``, and
    each answer's text becomes parts by a ``reader`` of its own."""

    def prompts(self, request: ChatRequest) -> Sequence[Prompt]:
        """One conversation for the model's chat template."""
        return request.prompts

    def options(self, request: ChatRequest) -> SamplingOptions:
        """All options but the seed, with the grammar that the request needs."""
        return request.options()

    def reader(self, request: ChatRequest) -> PartReader:
        """A reader for one answer to the request."""
        return PlainReader()

    def splits_reasoning(self, request: ChatRequest) -> bool:
        """Whether an answer may have reasoning, whose tokens are to be counted."""
        return False


class DescribedFormats:
    """The formats of the model that a server describes."""

    def __init__(self, client: AsyncFastServeClient) -> None:
        self._client = client

    async def current(self) -> ModelFormats:
        """Raises ClientError: the server does not answer."""
        return ModelFormats()
