"""Which connections there may be: each tenant has a share, and each address before it has a key."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

from fastserve_gateway.errors import share_used_up
from fastserve_gateway.shares import Shares

MAX_CONNECTIONS = 8192
"""Of all tenants, if the limit of open files allows. An idle one takes some 15 KiB."""
MAX_STRANGERS = 2048
"""Connections without a request that was let in. Each may hold 64 KiB of headers."""


def max_connections() -> int:
    """Half of the files that the process may open: connections to servers need some, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)


class Connection(Protocol):
    def drop(self) -> None:
        """Closes it at once."""


class Connections:
    """Counts the connections of each tenant, and of each address those of strangers: they have not
    sent a request with a valid key yet.

    A stranger that finds the share of its address used up gets the place of the oldest stranger
    there. So those who send a key at once get in, however many never send one. Tenants are told.

    Args:
        most: connections of all tenants. Half as many may be strangers', or ``MAX_STRANGERS``.
        are_shared, weights: among several tenants; see ``Shares``.
        on_refusal: called when a connection is dropped or refused.
    """

    def __init__(
        self,
        most: int,
        *,
        are_shared: bool,
        on_refusal: Callable[[], None],
        weights: Mapping[str | None, float] | None = None,
    ) -> None:
        self._tenants = Shares(most, are_divided=are_shared, weights=weights)
        self._addresses = Shares(min(MAX_STRANGERS, most // 2), are_divided=True)
        self._strangers: OrderedDict[Connection, str] = OrderedDict()
        """The address of each, the oldest first."""
        self._known: dict[Connection, str | None] = {}
        """The tenant of each."""
        self._on_refusal = on_refusal

    def on_connect(self, connection: Connection, address: str) -> None:
        """May drop another connection of the address."""
        if not self._addresses.allows(address, 1):
            self._on_refusal()
            own = (one for one, other in self._strangers.items() if other == address)
            oldest = next(own, None) or next(iter(self._strangers))
            self.on_end(oldest)
            oldest.drop()
        self._strangers[connection] = address
        self._addresses.add(address, 1)

    def on_request(self, connection: Connection, tenant: str | None) -> None:
        """The connection has sent a request of this tenant.

        Raises ApiError (429): the tenant has too many. The connection is closed with the answer.
        """
        if connection in self._known and self._known[connection] == tenant:
            return
        if not self._tenants.allows(tenant, 1):
            self._on_refusal()
            raise share_used_up(
                tenant,
                f"the connections: it has {self._tenants.held(tenant)}; close some, or send "
                "requests one after another",
                headers={"Connection": "close"},
            )
        self.on_end(connection)
        self._known[connection] = tenant
        self._tenants.add(tenant, 1)

    def on_end(self, connection: Connection) -> None:
        """Idempotent."""
        if connection in self._known:
            self._tenants.remove(self._known.pop(connection), 1)
        elif connection in self._strangers:
            self._addresses.remove(self._strangers.pop(connection), 1)
