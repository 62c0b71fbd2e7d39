"""Where to put temporary directories that hold sockets."""

from __future__ import annotations

import os
import tempfile


def short_temporary_directory(most_bytes: int) -> str:
    """The system's directory for temporary files, or /tmp if its path has more bytes.

    The whole path of a Unix socket has 107 bytes at most.
    """
    directory = tempfile.gettempdir()
    return directory if len(os.fsencode(directory)) <= most_bytes else "/tmp"
