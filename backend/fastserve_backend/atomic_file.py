"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

DRAFT_SUFFIX = ".tmp"
"""Of what a process leaves beside the file if it is killed while it writes."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at once and durably: no reader and no crash sees half of it.

    It can be read by this user alone. Raises OSError.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=DRAFT_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
