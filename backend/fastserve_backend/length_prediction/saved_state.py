"""The predictor's state in one safetensors file.

The vector index's own format is stored as a tensor of bytes, so one rename replaces everything.
The file contains no prompt, and nothing that could be executed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fastserve_backend.errors import FastServeError
from fastserve_backend.length_prediction.past_jobs import SavedJobs
from fastserve_backend.system.atomic_file import write_atomically

FILE_NAME = "predictor.safetensors"

_FORMAT = "fastserve-length-prediction"
_VERSION = "1"
_REGRESSOR = "regressor."

Tensors = dict[str, NDArray[Any]]


class SavedStateError(FastServeError):
    """The file exists but cannot be used; the message says why."""


class SavedState(NamedTuple):
    jobs: SavedJobs
    regressor: dict[str, NDArray[np.float32]]
    """Weights by name."""


def write_state(directory: Path, state: SavedState, encoder: str) -> None:
    """Replace the file atomically and durably. ``encoder`` is its identity. Raises OSError."""
    tensors: Tensors = {
        "index": np.frombuffer(state.jobs.vectors, dtype=np.uint8),
        "lengths": state.jobs.lengths,
        "weights": state.jobs.weights,
        "order": state.jobs.order,
    }
    tensors |= {f"{_REGRESSOR}{name}": value for name, value in state.regressor.items()}
    data = save(tensors, {**_made_by(encoder), "sha256": _sha256(tensors)})
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(directory / FILE_NAME, data)


def read_state(directory: Path, encoder: str) -> SavedState | None:
    """The state in ``directory``; None: nothing was saved there.

    Raises:
        SavedStateError: the file is damaged, or from another version or encoder.
    """
    try:
        with safe_open(directory / FILE_NAME, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        raise SavedStateError(f"cannot be read ({error})") from error
    for key, value in _made_by(encoder).items():
        if metadata.get(key) != value:
            raise SavedStateError(f"has {key} {metadata.get(key)!r}, not {value!r}")
    if metadata.get("sha256") != _sha256(tensors):
        raise SavedStateError("is damaged: its checksum is wrong")
    jobs = SavedJobs(
        tensors["index"].tobytes(), tensors["lengths"], tensors["weights"], tensors["order"]
    )
    regressor = {
        name.removeprefix(_REGRESSOR): value
        for name, value in tensors.items()
        if name.startswith(_REGRESSOR)
    }
    return SavedState(jobs, regressor)


def _made_by(encoder: str) -> dict[str, str]:
    return {"format": _FORMAT, "version": _VERSION, "encoder": encoder}


def _sha256(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype.str} {tensor.shape}\n".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()
