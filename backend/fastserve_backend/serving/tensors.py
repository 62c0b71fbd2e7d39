"""Triton's tensors of a response."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from fastserve_client import protocol

from fastserve_backend.serving.responses import Response, strings

# So many hold 92% of the tokens of this project's documents, eight of them at a time. Those of a
# token take 3 kB, of which 500 bytes are shared memory.
_NUM_KEPT = 2048
_LONGEST_KEPT_TEXT = 32


class TensorMaker:
    """Makes the tensors of responses, and keeps those of the tokens that were sent last.

    Making both tensors of a token takes 20 µs, a third of what its response costs the emitter, and
    most tokens of a text have been in others before. One thread at a time may use the tensors: the
    stub copies a tensor to shared memory when it is first sent, without a lock.
    """

    def __init__(self) -> None:
        self._kept = lru_cache(_NUM_KEPT)(_text_tensors)

    def make(self, response: Response) -> list[Any]:
        text, token_ids, more = response
        is_kept = len(token_ids) == 1 and len(text) <= _LONGEST_KEPT_TEXT
        text_tensors = self._kept(text, token_ids) if is_kept else _text_tensors(text, token_ids)
        return [*text_tensors, *(pb_utils.Tensor(name, array) for name, array in more)]

    def forget(self) -> None:
        """Let go of the kept ones, before the stub's shared memory goes."""
        self._kept.cache_clear()


def _text_tensors(text: str, token_ids: tuple[int, ...]) -> tuple[Any, Any]:
    return (
        pb_utils.Tensor(protocol.TEXT_OUTPUT, strings(text)),
        pb_utils.Tensor(protocol.OUTPUT_IDS, np.array(token_ids, np.int32)),
    )
