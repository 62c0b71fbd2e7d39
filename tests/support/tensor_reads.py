"""Finds what would make the host wait for a GPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class ReadsOfTensors(TorchDispatchMode):
    """Operations whose results' values or shapes the host needs: with them it waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select") or "unique" in name:
            self.found.add(name)
        return operation(*args, **(kwargs or {}))
