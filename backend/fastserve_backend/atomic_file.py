"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
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


def remove_drafts(drafts: Iterable[Path], age_s: float) -> None:
    """Those, files or directories, that did not change for so long: their process was killed."""
    for draft in drafts:
        with suppress(FileNotFoundError):  # another process tidies up as well, or has ended
            if time.time() - draft.stat().st_mtime <= age_s:
                continue
            if draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                draft.unlink()
