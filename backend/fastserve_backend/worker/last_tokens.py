"""The tokens of the last step, for a next one that is sent before the host knows them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastserve_backend.models.tensor_group import TensorGroup


class LastTokens:
    """What the last step chose, on the device where the next one needs it.

    Only the first rank of a tensor group chooses. The others know how many there are, and get them
    when a step needs them.
    """

    def __init__(self, tensor: TensorGroup) -> None:
        self.count = 0
        """Of the tokens; 0 before the first step."""
        self._tensor = tensor
        self._token_ids: Tensor | None = None

    def keep(self, count: int, token_ids: Tensor | None) -> None:
        """Instead of those before; int64 [count], which may still be computed, or None on the ranks
        that do not choose."""
        self.count = count
        self._token_ids = token_ids

    def fill_in(self, token_ids: Tensor) -> None:
        """Replace the negative ones of a step's tokens, in place: each is an index of a kept one,
        from the end. The host waits for nothing.

        Every rank of the group must call this. There must be a kept token.

        Args:
            token_ids: int64 [n].
        """
        kept = self._token_ids
        if kept is None:
            kept = torch.empty(self.count, dtype=torch.int64, device=token_ids.device)
        self._tensor.broadcast(kept)
        # The others look up the last one, for nothing: a selection by mask would have a size that
        # the host had to wait for.
        found = kept[token_ids.clamp(max=-1)]
        torch.where(token_ids < 0, found, token_ids, out=token_ids)
