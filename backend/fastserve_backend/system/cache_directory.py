"""Where this user's engines keep what a later start can use again."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from fastserve_backend.errors import ConfigError


def cache_directory(name: str) -> Path:
    """The directory for one kind of data, such as profiles. It need not exist.

    Raises ConfigError: this user has no home directory, and the environment names no other.
    """
    try:
        return Path(platformdirs.user_cache_dir("fastserve")) / name
    except RuntimeError:
        given = " and ".join(
            f"{variable} {os.environ.get(variable)!r}" for variable in ("HOME", "XDG_CACHE_HOME")
        )
        raise ConfigError(
            f"no cache directory: got {given}, and user {os.getuid()} has no home directory; set "
            "HOME or XDG_CACHE_HOME to an absolute path"
        ) from None
