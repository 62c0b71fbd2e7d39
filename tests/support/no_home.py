"""A user without a home directory, as in containers that run as a bare user id."""

from __future__ import annotations

import os

import pytest


def leave_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
