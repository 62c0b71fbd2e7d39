"""Which pages of other sites may use the gateway from a browser (CORS)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi import FastAPI
from fastserve_client.errors import InvalidRequest
from starlette.middleware.cors import CORSMiddleware

from fastserve_gateway.body import IGNORED_FIELDS_HEADER

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s,]+")
"""As browsers write it: https://fetch.spec.whatwg.org/#origin-header. Also of desktop programs."""
_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = ("x-request-id", "request-id", "Retry-After", IGNORED_FIELDS_HEADER)
"""What pages may read of an answer, beside what they always may."""


def check_origins(origins: Sequence[str]) -> None:
    """Raises InvalidRequest: one of them is no origin."""
    for one in origins:
        if one != ANY_ORIGIN and not _ORIGIN.fullmatch(one):
            raise InvalidRequest(
                f"cors_origin: got {one!r}; must be {ANY_ORIGIN} or an origin without a path, such "
                "as https://chat.example.com or http://localhost:3000"
            )


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Answers to pages of these origins have CORS headers, and their preflight requests need no
    key. Without origins nothing changes. It comes around all other middleware, so that pages can
    read each error.

    Cookies and the like are for named origins only, because a proxy may have some: the gateway
    itself reads none.
    """
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            allow_credentials=ANY_ORIGIN not in origins,
            allow_private_network=True,  # a gateway on the user's own machine
            expose_headers=_EXPOSED,
        )
