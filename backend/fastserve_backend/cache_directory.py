"""Where this user's engines keep what a later start need not make again."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def cache_directory(name: str) -> Path:
    """The directory of one kind of such things, which need not exist."""
    return Path(platformdirs.user_cache_dir("fastserve")) / name
