"""Converts GGUF files (llama.cpp's format), once each, to a directory in Hugging Face's format.

The conversion needs torch, so it runs in a process of its own, `gguf_process`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.system.atomic_file import remove_drafts
from fastserve_backend.system.cache_directory import cache_directory
from fastserve_backend.system.interpreter import child_environment, python_executable

# Part of the cache's key. Raise it when the same file must be converted in another way.
_VERSION = 8

# A slow disk takes minutes for the largest model that it can hold twice.
_TIMEOUT_S = 3600.0
_DRAFT = ".new-"

# A conversion is as large as its model. It is removed if its file is gone or has changed, and no
# server has started with it for so long.
_UNUSED_S = 30 * 24 * 3600.0
_SOURCE = "source"  # a file in the conversion, with the path of the GGUF file

_log = logging.getLogger(__name__)


def converted_gguf(file: Path) -> Path:
    """The directory with the safetensors, configuration, tokenizer and chat template of `file`.

    The first call creates it in the user's cache directory, with a progress bar on stderr. Weights
    are dequantised to bfloat16. A changed file is converted anew. The old conversion is removed by
    a later one, if it has not been used for 30 days. Several processes may call this at once.

    Raises:
        ModelError: the file is damaged, or its model cannot be served.
    """
    directory = _directory(file)
    if directory.is_dir():
        with suppress(OSError):  # the cache may be another user's
            os.utime(directory)  # marks it as used
    else:
        _log.info("converting %s to %s, once", file, directory)
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
    return cache_directory("gguf") / f"{name}-{key}"


def _make(file: Path, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    remove_drafts(directory.parent.glob(f"{_DRAFT}*"), _TIMEOUT_S)
    _remove_unused(directory.parent)
    with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=directory.parent) as scratch:
        made = Path(scratch) / "model"
        _convert(file, made)
        (made / _SOURCE).write_bytes(os.fsencode(file.resolve()))
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
        return _directory(Path(os.fsdecode((conversion / _SOURCE).read_bytes()))) != conversion
    except OSError:
        return True


def _convert(file: Path, target: Path) -> None:
    command = [python_executable(), "-m", "fastserve_backend.models.gguf_process"]
    try:
        subprocess.run(
            [*command, str(file), str(target)],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        reason = error.stdout.strip() or f"the conversion ended with exit code {error.returncode}"
        raise ModelError(f"{file}: {reason}") from None
    except subprocess.TimeoutExpired:
        raise ModelError(f"{file}: the conversion took over {_TIMEOUT_S:.0f} s") from None
