"""Makes, once for each GGUF file (llama.cpp's format), a directory in Hugging Face's format.

Its weights stay in the GGUF file, where ranks find them by an index (`gguf_index`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_index import conversions_directory, source_file
from fastserve_backend.system.atomic_file import remove_drafts
from fastserve_backend.system.cache_directory import check_private

# Part of the cache's key. Raise it when the same file must be converted in another way.
_VERSION = 11

_DRAFT = ".new-"
# A conversion takes a second. Drafts that are so old were left by a crash.
_OLD_DRAFT_S = 3600.0

# Conversions of earlier versions are as large as their models. One is removed if its file is gone
# or has changed, and no server has started with it for so long.
_UNUSED_S = 30 * 24 * 3600.0

_log = logging.getLogger(__name__)


def converted_gguf(file: Path) -> Path:
    """The directory with the configuration, tokenizer, chat template and tensor index of `file`.

    The first call creates it in the user's cache directory. A changed file is converted anew. The
    old conversion is removed by a later one, if it has not been used for 30 days. Several processes
    may call this at once.

    Raises:
        ModelError: the file is damaged, or its model cannot be served.
        ConfigError: there is no cache directory, or other users can write to it.
    """
    directory = _directory(file)
    check_private(directory)
    if directory.is_dir():
        with suppress(OSError):  # the cache may be another user's
            os.utime(directory)  # marks it as used
    else:
        try:
            _make(file, directory)
        except OSError as error:
            raise ModelError(
                f"{file}: cannot be converted to {directory} ({error}); set XDG_CACHE_HOME to a "
                "directory that can be written to"
            ) from error
    return directory


def _directory(file: Path) -> Path:
    """The conversion's place for the file as it is now. Raises OSError if there is no file."""
    stat = file.stat()
    # The file may be a link with another name. The server's process can only spell ASCII names.
    real = file.resolve()
    name = real.stem.encode("ascii", "ignore").decode()
    version = f"\n{stat.st_size}\n{stat.st_mtime_ns}\n{_VERSION}"
    key = hashlib.sha256(os.fsencode(real) + version.encode()).hexdigest()[:16]
    return conversions_directory() / f"{name}-{key}"


def _make(file: Path, directory: Path) -> None:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_drafts(directory.parent.glob(f"{_DRAFT}*"), _OLD_DRAFT_S)
    _remove_unused(directory.parent)
    with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=directory.parent) as scratch:
        made = Path(scratch) / "model"
        _convert(file, made)
        try:
            made.rename(directory)
        except OSError:
            if not directory.is_dir():  # it is there if another process was faster
                raise


def _remove_unused(conversions: Path) -> None:
    for one in conversions.glob("[!.]*"):
        with suppress(OSError):  # another process removes it too, or another user owns it
            if time.time() - one.stat().st_mtime > _UNUSED_S and _is_outdated(one):
                # Rename it first, so that nobody finds a part of it.
                draft = one.rename(one.with_name(f"{_DRAFT}{one.name}"))
                shutil.rmtree(draft)
                _log.info("removed %s: its file has changed or gone", one)


def _is_outdated(conversion: Path) -> bool:
    try:
        return _directory(source_file(conversion)) != conversion
    except OSError:
        return True


def _convert(file: Path, target: Path) -> None:
    # A rank, whose directory exists, has no use for these imports.
    from fastserve_backend.checkpoints.gguf_conversion import convert

    try:
        convert(file, target)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
