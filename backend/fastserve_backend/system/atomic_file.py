"""Writing a file so that readers see all of it or none."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# A draft older than this is abandoned: no file takes so long to write.
_OLD_DRAFT_S = 600.0


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file atomically and durably: no reader and no crash sees half of it.

    Only this user can read it. Drafts that killed processes left behind are removed. Raises
    OSError.
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
    """Remove the files and directories that have not changed for ``age_s`` seconds: the process
    that wrote them was killed."""
    for draft in drafts:
        with suppress(OSError):  # another process removed it, or it is another user's
            if time.time() - draft.stat().st_mtime <= age_s:
                continue
            if draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                draft.unlink()
