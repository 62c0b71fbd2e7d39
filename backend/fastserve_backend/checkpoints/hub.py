"""Fetches a Hugging Face repository's files into the local cache. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.weight_index import read_weight_index

_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"{_NAME}/{_NAME}(@{_NAME}(/{_NAME})*)?")

_TIMEOUT_S = 10.0  # for the one small request that lists a repository

_CONFIG_AND_TOKENIZER = (
    "*.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)


@dataclass(frozen=True)
class _WeightFiles:
    patterns: tuple[str, ...]
    """They leave out variants such as model.fp16.safetensors, which are never read."""
    index: str
    """The index file. It may also name files that match no pattern."""


_SAFETENSORS = _WeightFiles(
    ("model.safetensors", "model-*.safetensors"), "model.safetensors.index.json"
)
_TORCH = _WeightFiles(("pytorch_model*.bin",), "pytorch_model.bin.index.json")
_SAFETENSORS_BEGIN = {"model.safetensors", _SAFETENSORS.index}  # one of them is needed


def is_hub_id(model: str) -> bool:
    """True for "owner/name" and "owner/name@revision". It does not ask whether that exists."""
    return _HUB_ID.fullmatch(model) is not None


def at_commit(model: str, directory: str | None) -> str:
    """`model`; a hub id gets the commit of `directory`, its local snapshot.

    With it another host finds the same files, whatever has been pushed since.
    """
    if directory is None or not is_hub_id(model) or Path(model).is_dir():
        return model
    return f"{without_revision(model)}@{Path(directory).name}"


def without_revision(model: str) -> str:
    """The repository's name. Anything but a hub id is returned unchanged."""
    return model.partition("@")[0] if is_hub_id(model) else model


def download(model: str, *, weights: bool) -> Path:
    """The local snapshot of hub id `model`. Files that the cache lacks are fetched.

    A revision is a branch, tag or commit; the default is the main branch. Without network the cache
    alone is used.

    Args:
        weights: also fetch the safetensors or, if there are none, `pytorch_model*.bin`, and the
            files that their index names.

    Raises:
        ModelError: the repository is neither cached nor reachable.
    """
    # Imported here: most runs use local directories and should not pay for the import.
    from huggingface_hub import HfApi, snapshot_download

    repository, _, revision = model.partition("@")
    snapshot = partial(snapshot_download, repository, revision=revision or None)
    files = _SAFETENSORS if weights else None
    try:
        if weights:
            # Not list_repo_files, which retries for 20 seconds if there is no network.
            info = HfApi().model_info(repository, revision=revision or None, timeout=_TIMEOUT_S)
            if _SAFETENSORS_BEGIN.isdisjoint(file.rfilename for file in info.siblings or []):
                files = _TORCH
        return _fetch(snapshot, files)
    except Exception as error:  # the hub client raises the errors of several libraries
        try:
            # With the patterns: the client refuses a snapshot that lacks any other file.
            return _fetch(partial(snapshot, local_files_only=True), files)
        except Exception:
            reason = next(iter(str(error).splitlines()), "")
            raise ModelError(
                f"model {model!r} is no local directory and cannot be fetched from the Hugging "
                f"Face hub ({type(error).__name__}: {reason}); check the name and the network, or "
                "give a local directory"
            ) from error


def _fetch(snapshot: Callable[..., str], files: _WeightFiles | None) -> Path:
    """Fetch configuration, tokenizer and index; then the weight files, unless `files` is None."""
    directory = Path(snapshot(allow_patterns=list(_CONFIG_AND_TOKENIZER)))
    if files is None:
        return directory
    index = directory / files.index
    named = [escape(name) for name in read_weight_index(index)] if index.is_file() else []
    return Path(snapshot(allow_patterns=[*_CONFIG_AND_TOKENIZER, *files.patterns, *named]))
