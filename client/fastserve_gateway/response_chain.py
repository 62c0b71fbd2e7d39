"""Responses that continue stored ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastserve_gateway.errors import ApiError
from fastserve_gateway.held_bodies import Take
from fastserve_gateway.model_formats import DescribedFormats
from fastserve_gateway.response_store import ResponseStore, StoredResponse
from fastserve_gateway.responses_answer import ResponsesAnswer
from fastserve_gateway.responses_schema import ResponsesRequest

_REASON = "no such response; it was not stored, is deleted, or made room for others"


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

    async def answer(
        self, body: ResponsesRequest, formats: DescribedFormats, take: Take
    ) -> ResponsesAnswer:
        """The answer to a request. It is stored when it is whole, if that is wanted.

        Raises ApiError: the response that it continues is not there (404), or there is no room for
        its conversation (429). ClientError: the server does not describe its model.
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
            history, session_id = earlier.messages, earlier.session_id

        def keep(
            response: Mapping[str, Any], message: Mapping[str, Any], session_id: str | None
        ) -> bool:
            messages = [*history, *body.input_messages(), message]
            return self._store.put(self._tenant, response, messages, session_id)

        stores = self._store.is_on and body.store is not False
        return ResponsesAnswer(
            body,
            body.chat(history),
            await formats.current(),
            session_id,
            keep if stores else None,
        )
