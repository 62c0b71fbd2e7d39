"""The files that the server reads must agree with the code."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving import launch
from fastserve_backend.serving.repository import ENGINE_FILE, find_model_template, write_model
from fastserve_client import protocol
from launched import start_server


def test_shipped_engine_file_has_every_default() -> None:
    path = find_model_template() / ENGINE_FILE
    assert EngineConfig.from_yaml(path) == EngineConfig()
    text = path.read_text(encoding="utf-8")
    for section in EngineConfig().model_dump().values():
        for key in section:
            assert f"  {key}: " in text


def test_written_repository_has_the_given_configuration(tmp_path: Path) -> None:
    config = EngineConfig().with_keys(model="opt-125m", load_format="dummy", max_num_seqs=3)
    model = write_model(tmp_path, protocol.MODEL_NAME, config)
    assert EngineConfig.from_yaml(model / ENGINE_FILE) == config
    assert (model / "1" / "model.py").is_file()
    # The stub need not write there: Triton would take that for a change of the model.
    assert list(model.rglob("*.pyc")) == [Path(cache_from_source(str(model / "1" / "model.py")))]


def test_model_directory_may_have_any_name(tmp_path: Path) -> None:
    """The stub takes file names for ASCII, so it gets another name for the directory."""
    directory = tmp_path / "Größe 大"
    directory.mkdir()
    config = EngineConfig().with_keys(model=str(directory), tokenizer="someone/else")
    model = write_model(tmp_path / "repository", protocol.MODEL_NAME, config)
    written = EngineConfig.from_yaml(model / ENGINE_FILE)
    assert written.model.model.isascii()
    assert Path(written.model.model).samefile(directory)
    assert written.model.tokenizer == "someone/else"


def test_a_name_that_the_system_refuses_is_left_to_who_loads_it(tmp_path: Path) -> None:
    """The name is too long. The system refuses names in unsearchable directories alike, though not
    to root."""
    config = EngineConfig().with_keys(tokenizer="Größe" * 100)
    model = write_model(tmp_path, protocol.MODEL_NAME, config)
    assert EngineConfig.from_yaml(model / ENGINE_FILE) == config


def test_a_gguf_file_may_have_any_name(tmp_path: Path) -> None:
    file = tmp_path / "modèle.gguf"
    file.touch()
    config = EngineConfig().with_keys(model=str(file))
    model = write_model(tmp_path / "repository", protocol.MODEL_NAME, config)
    written = Path(EngineConfig.from_yaml(model / ENGINE_FILE).model.model)
    assert str(written).isascii()
    assert written.suffix == ".gguf"
    assert written.samefile(file)
    # The launcher and the stub, which knows only ASCII names, look for the same model.
    ask = (
        "import sys; from pathlib import Path; from fastserve_backend.checkpoints import gguf; "
        "gguf._make = lambda file, directory: print(directory.name); "
        "gguf.converted_gguf(Path(sys.argv[1]))"
    )
    names = set()
    for path, setting in ((file, "1"), (written, "0")):
        environment = os.environ | {
            "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": setting,
            "XDG_CACHE_HOME": str(tmp_path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", ask, str(path)],
            env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        names.add(done.stdout)
    (name,) = names
    assert name.startswith("modle-")


def test_shim_makes_a_named_backend(
    tiny_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``backend: "fastserve"``: the model is only a config.pbtxt and an engine.yaml."""

    def write_named(directory: Path, name: str, config: EngineConfig) -> Path:
        model = write_model(directory, name, config)
        backend = directory.parent / "backends" / "fastserve"
        backend.mkdir(parents=True)
        (model / "1" / "model.py").rename(backend / "model.py")
        text = (model / "config.pbtxt").read_text(encoding="utf-8")
        named = text.replace('backend: "python"', 'backend: "fastserve"')
        assert named != text
        (model / "config.pbtxt").write_text(named, encoding="utf-8")
        return model

    monkeypatch.setattr(launch, "write_model", write_named)
    start_server(tiny_config, tmp_path / "server.log").stop()
