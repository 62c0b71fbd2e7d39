"""What one package logs. Servers that other tests of the worker share may log meanwhile."""

from __future__ import annotations

import pytest


def messages_of(caplog: pytest.LogCaptureFixture, package: str) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith(f"{package}.")]
