"""Where this user's engines keep what a later start can use again."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import platformdirs

from fastserve_backend.errors import ConfigError


def cache_directory(name: str) -> Path:
    """The directory for one kind of data, such as profiles. It need not exist.

    What is in it counts as written by this user's engines. So it must be private: this user owns
    it and the directory ``fastserve`` around it, and nobody else can write to them.

    Raises:
        ConfigError: this user has no home directory, and the environment names no other; or the
            directory is not private.
    """
    try:
        root = Path(platformdirs.user_cache_dir("fastserve"))
    except RuntimeError:
        given = " and ".join(
            f"{variable} {os.environ.get(variable)!r}" for variable in ("HOME", "XDG_CACHE_HOME")
        )
        raise ConfigError(
            f"no cache directory: got {given}, and user {os.getuid()} has no home directory; set "
            "HOME or XDG_CACHE_HOME to an absolute path"
        ) from None
    with suppress(OSError):  # whoever writes there says what is wrong
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(root)
    check_private(root / name)
    return root / name


def check_private(directory: Path) -> None:
    """Raise ConfigError if it exists, and another user owns it or can write to it."""
    try:
        status = directory.stat()
    except OSError:
        return
    if status.st_uid != os.getuid():
        problem, remedy = f"belongs to user {status.st_uid}", "remove it"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        problem, remedy = f"has mode {mode:o}", f"run `chmod go-w {directory}`"
    else:
        return
    raise ConfigError(
        f"cache directory {directory} {problem}, but only user {os.getuid()} may write to it; "
        f"{remedy}, or set XDG_CACHE_HOME to another directory"
    )
