"""Reads the index of a divided checkpoint: which file has which tensor. Imports no torch."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path, PurePosixPath

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.limits import check_file


def read_weight_index(index: Path) -> dict[str, set[str]]:
    """The tensors to take from each weight file, by the file's path below the index's directory.

    A file may hold other tensors too. Ignore them: they may be stale copies of tensors that another
    file replaces.

    Raises:
        ModelError: the file is no index or too large, or it names a file outside its directory.
    """
    tensors: defaultdict[str, set[str]] = defaultdict(set)
    try:
        check_file(index)
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is no index of weight files: {error!r}") from error
    for tensor, file in entries:
        if not isinstance(file, str) or not _is_below(PurePosixPath(file)):
            raise ModelError(f"{index} names {file!r}, which is no file beside it")
        tensors[file].add(tensor)
    return dict(tensors)


def _is_below(path: PurePosixPath) -> bool:
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts
