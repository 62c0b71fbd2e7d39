"""Files that are there whole or not at all."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# No file takes so long to write.
_OLD_DRAFT_S = 600.0


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file at once and durably: no reader and no crash sees half of it.

    It can be read by this user alone. What processes that were killed while they wrote it have left
    goes. Raises OSError.
    """
    remove_drafts(path.parent.glob(f"{glob.escape(path.name)}.*.tmp"), _OLD_DRAFT_S)
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


def remove_drafts(drafts: Iterable[Path], age_s: float) -> None:
    """Those, files or directories, that did not change for so long: their process was killed."""
    for draft in drafts:
        with suppress(OSError):  # another process tidies up as well, or it is another user's
            if time.time() - draft.stat().st_mtime <= age_s:
                continue
            if draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                draft.unlink()
