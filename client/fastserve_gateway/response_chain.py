"""Responses that continue stored ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve_gateway.errors import ApiError
from fastserve_gateway.held_bodies import Take
from fastserve_gateway.model_formats import DescribedFormats
from fastserve_gateway.response_store import GONE, ResponseStore, StoredResponse
from fastserve_gateway.responses_answer import ResponsesAnswer
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import ChatRequest
from fastserve_gateway.stored_items import StoredItems

_REASON = f"no such response; {GONE}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request is about, with what is stored of it."""

    history: Sequence[Mapping[str, Any]]
    """The messages of earlier responses."""
    own: Sequence[Mapping[str, Any]]
    """Those of the request's ``input``."""
    chat: ChatRequest
    session_id: str | None
    """The session of the earlier responses."""


class ResponseChains:
    """The stored responses of one tenant: see ``ResponseStore``."""

    def __init__(self, store: ResponseStore, tenant: str | None) -> None:
        self._store = store
        self._tenant = tenant

    def find(self, response_id: str) -> StoredResponse:
        """Raises ApiError (404): it is not there."""
        stored = self._store.get(self._tenant, response_id)
        if stored is None:
            raise ApiError(404, _REASON)
        return stored

    def delete(self, response_id: str) -> None:
        """Raises ApiError (404): it is not there."""
        if not self._store.delete(self._tenant, response_id):
            raise ApiError(404, _REASON)

    def conversation(self, body: ResponsesRequest, take: Take) -> Conversation:
        """The conversation of a request.

        Raises ApiError: the response that it continues is not there (404), an item that it refers
        to is not (400), or there is no room for them (429).
        """
        history: Sequence[Mapping[str, Any]] = ()
        session_id = None
        if body.previous_response_id is not None:
            earlier = self._store.get(self._tenant, body.previous_response_id)
            if earlier is None:
                raise ApiError(
                    404,
                    f"previous_response_id: {_REASON}. Send the whole conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            take(earlier.num_bytes)
            history, session_id = earlier.conversation

        own = body.input_messages(StoredItems(self._store, self._tenant, take).find)
        return Conversation(history, own, body.chat(history, own), session_id)

    async def answer(
        self, body: ResponsesRequest, formats: DescribedFormats, take: Take
    ) -> ResponsesAnswer:
        """The answer to a request. It is stored when it is whole, if that is wanted.

        Raises ApiError: as ``conversation`` does. ClientError: the server does not describe its
        model.
        """
        found = self.conversation(body, take)

        def keep(
            response: Mapping[str, Any], message: Mapping[str, Any], session_id: str | None
        ) -> bool:
            messages = [*found.history, *found.own, message]
            return self._store.put(self._tenant, response, messages, session_id)

        stores = self._store.is_on and body.store is not False
        return ResponsesAnswer(
            body,
            found.chat,
            await formats.current(),
            found.session_id,
            keep if stores else None,
        )
