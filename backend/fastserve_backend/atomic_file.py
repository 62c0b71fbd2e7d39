"""Files that are there whole or not at all."""

from __future__ import annotations

import glob
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# None takes so long to write.
_OLD_DRAFT_S = 600.0


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at once and durably: no reader and no crash sees half of it.

    It can be read by this user alone. What processes that were killed while they wrote it have left
    goes. Raises OSError.
    """
    _remove_old_drafts(path)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _remove_old_drafts(path: Path) -> None:
    for draft in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):  # another process may be faster, or it is another user's
            if time.time() - draft.stat().st_mtime > _OLD_DRAFT_S:
                draft.unlink()
