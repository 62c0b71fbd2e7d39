from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.errors import ConfigError
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
