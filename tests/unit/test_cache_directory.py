from __future__ import annotations

import os
from pathlib import Path

import pytest
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.errors import ConfigError
from fastserve_backend.system.cache_directory import cache_directory
from no_home import leave_without_home


def test_without_a_home_no_gguf_file_can_be_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_without_home(monkeypatch)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError) as error:
        load_model_config(str(tmp_path / "m.gguf"), load_format="auto")
    assert str(error.value) == (
        "no cache directory: got HOME None and XDG_CACHE_HOME None, and user 4000000000 has no "
        "home directory; set HOME or XDG_CACHE_HOME to an absolute path"
    )


def test_the_cache_is_private_whatever_the_users_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mask = os.umask(0)
    try:
        directory = cache_directory("profiles")
    finally:
        os.umask(mask)
    assert directory == tmp_path / "fastserve" / "profiles"
    assert directory.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["fastserve", "fastserve/profiles"])
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_cache_that_others_can_write_to_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / name
    directory.mkdir(parents=True)
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=rf"^cache directory {directory} has mode {mode:o}, but "):
        cache_directory("profiles")
    directory.chmod(0o755)
    assert cache_directory("profiles") == tmp_path / "fastserve" / "profiles"


def test_another_users_cache_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    owner = os.getuid()
    cache_directory("profiles")
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, but only user {owner + 1}"):
        cache_directory("profiles")
