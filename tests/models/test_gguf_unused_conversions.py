"""How long conversions of GGUF files are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fastserve_backend.models.gguf import converted
from fastserve_backend.models.gguf_conversion import convert
from gguf_files import random_llama, write_llama

DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fastserve_backend.models.gguf._convert", convert)  # in this process
    return tmp_path / "cache" / "fastserve" / "gguf"


def used_days_ago(conversion: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(conversion, (then, then))


def test_conversions_that_nobody_used_for_long_go_when_another_is_made(
    cache: Path, tmp_path: Path
) -> None:
    files = [write_llama(tmp_path / f"{name}.gguf", random_llama()) for name in "abcd"]
    unused, recent, used = (converted(file) for file in files[:3])
    for conversion, days in ((unused, 31), (recent, 29), (used, 400)):
        used_days_ago(conversion, days)
    assert converted(files[2]) == used
    assert {*cache.iterdir()} == {unused, recent, used}  # a start with what is there removes none
    added = converted(files[3])
    assert {*cache.iterdir()} == {recent, used, added}
    # It is made again.
    assert converted(files[0]) == unused
    assert (unused / "config.json").is_file()
