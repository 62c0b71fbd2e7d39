"""Where directories for temporary files can be that are to hold sockets."""

from __future__ import annotations

import os
import tempfile


def short_temporary_directory(most_bytes: int) -> str:
    """The system's directory for temporary files, or /tmp where its path is longer.

    The path of a Unix socket, with all directories below that one, has 107 bytes at most.
    """
    directory = tempfile.gettempdir()
    return directory if len(os.fsencode(directory)) <= most_bytes else "/tmp"
