"""Writing models of a Triton model repository from engine configurations."""

from __future__ import annotations

import os
import py_compile
import shutil
from importlib import resources
from pathlib import Path

from fastserve_client.protocol import MODEL_NAME

from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.errors import LaunchError

ENGINE_FILE = "engine.yaml"


def find_model_template() -> Path:
    """The model directory that the project ships: in the source tree, else in the package's data.

    Raises:
        LaunchError: there is neither, so the installation is broken.
    """
    package = Path(str(resources.files("fastserve_backend")))
    candidates = [
        package.parent.parent / "model_repository" / MODEL_NAME,
        package / "model_repository" / MODEL_NAME,
    ]
    for candidate in candidates:
        if (candidate / "config.pbtxt").is_file():
            return candidate
    raise LaunchError(
        "the model repository of the package is missing (looked for "
        + " and ".join(str(path) for path in candidates)
        + "); reinstall fastserve"
    )


def write_model(repository: Path, name: str, config: EngineConfig) -> Path:
    """Write the model ``repository/name``, with ``config`` as ``engine.yaml``; returns its path."""
    model = repository / name
    shutil.copytree(find_model_template(), model, ignore=shutil.ignore_patterns("__pycache__"))
    # The stub would write this file, and Triton take that for a change of the model: it would load
    # it anew together with an ensemble that has it as a step.
    py_compile.compile(str(model / "1" / "model.py"))
    description = model / "config.pbtxt"
    text = description.read_text(encoding="utf-8")
    renamed = text.replace(f'name: "{MODEL_NAME}"', f'name: "{name}"', 1)
    description.write_text(renamed, encoding="utf-8")
    paths = {"model": config.model.model, "tokenizer": config.model.tokenizer}
    config = config.with_keys(
        **{key: _ascii_path(path, model / f"{key}-files") for key, path in paths.items()}
    )
    (model / ENGINE_FILE).write_text(config.to_yaml(), encoding="utf-8")
    return model


def _ascii_path(path: str | None, link: Path) -> str | None:
    # The stub's Python decodes file names as ASCII, and no setting changes that.
    if path is None or path.isascii() or not os.path.exists(path):
        return path
    if Path(path).is_file():
        link = link.with_suffix(Path(path).suffix)  # which marks a GGUF file
    link.symlink_to(Path(path).resolve())
    return str(link)
