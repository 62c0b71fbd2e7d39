"""Free blocks that hold something, by what it is and by age."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class KeptBlocks:
    """Operations cost O(1), and ``take_oldest`` O(blocks of one key)."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, bytes] = OrderedDict()  # in the order in which they came
        self._blocks: dict[bytes, list[int]] = {}  # of each key, in the same order

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        """Whether there is a block of this key."""
        return key in self._blocks

    def add(self, block: int, key: bytes) -> None:
        """``key``: of what it holds."""
        self._keys[block] = key
        self._blocks.setdefault(key, []).append(block)

    def take(self, key: bytes) -> int | None:
        """The block of this key that came last; None: there is none."""
        if key not in self._blocks:
            return None
        block = self._blocks[key].pop()
        del self._keys[block]
        self._forget_if_last(key)
        return block

    def take_oldest(self) -> int:
        """The one that came first, to hold something else. There must be one."""
        block, key = self._keys.popitem(last=False)
        self._blocks[key].pop(0)
        self._forget_if_last(key)
        return block

    def _forget_if_last(self, key: bytes) -> None:
        if not self._blocks[key]:
            del self._blocks[key]
