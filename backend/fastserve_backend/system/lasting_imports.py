"""Imports of a process that lives no longer than they are needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Keeps what is imported within out of garbage collection.

    With torch that is 300,000 objects. To look through them for garbage again and again takes a
    quarter to a third of the processor time of the import, some time later on, and half a second
    when the process ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
