"""When unused conversions of GGUF files are deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fastserve_backend.checkpoints.gguf import converted_gguf
from gguf_files import random_llama, write_llama

DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fastserve" / "gguf"


def used_days_ago(conversion: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(conversion, (then, then))


def test_conversions_of_files_that_are_gone_or_changed_go_when_another_is_made(
    cache: Path, tmp_path: Path
) -> None:
    files = [write_llama(tmp_path / f"{name}.gguf", random_llama()) for name in "abcdef"]
    gone, changed, recent, used, there = (converted_gguf(file) for file in files[:5])
    for conversion in (gone, changed, used, there):
        used_days_ago(conversion, 31)
    used_days_ago(recent, 29)
    assert converted_gguf(files[3]) == used
    for file in (files[0], files[2], files[3]):
        file.unlink()
    os.utime(files[1], (0, 0))
    assert {*cache.iterdir()} == {gone, changed, recent, used, there}
    added = converted_gguf(files[5])
    # A server may restart ranks after a long time, if the original file is still there.
    assert {*cache.iterdir()} == {recent, used, there, added}
    again = converted_gguf(files[1])
    assert again != changed
    assert (again / "config.json").is_file()
