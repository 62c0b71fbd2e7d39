"""GGUF files, llama.cpp's format: converted once to a directory in Hugging Face's format.

Without torch: the conversion has a process of its own, `gguf_process`.
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

# Part of the key of what is cached: to be raised when the same file is to give something else.
_VERSION = 7

# Minutes from a slow disk, for the largest model that a disk holds twice.
_TIMEOUT_S = 3600.0
_DRAFT = ".new-"

# A conversion is as large as its model. One whose file is there no more, or has another date, as in
# a new environment, goes when no server has started with it for so long.
_UNUSED_S = 30 * 24 * 3600.0
_SOURCE = "source"  # within it: the path of the file

_log = logging.getLogger(__name__)


def converted(file: Path) -> Path:
    """The directory with the safetensors, configuration, tokenizer and chat template of `file`.

    Made at the first call, with a progress bar on stderr, and kept in the user's cache directory.
    When the file has changed another is made; the old one goes when one is made after 30 days
    without a call. Weights are dequantised to bfloat16. Safe to call from several processes.

    Raises ModelError for a file that is damaged or holds a model that cannot be served.
    """
    directory = _directory(file)
    if directory.is_dir():
        with suppress(OSError):  # the cache may be another user's
            os.utime(directory)  # it is used
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
    """Of the file as it is now. Raises OSError: there is no such file."""
    stat = file.stat()
    # The file may be a link of another name, and the server's process takes names for ASCII.
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
            if not directory.is_dir():  # if it is, another process was faster
                raise


def _remove_unused(conversions: Path) -> None:
    for one in conversions.glob("[!.]*"):
        with suppress(OSError):  # another process removes it as well, or it is another user's
            if time.time() - one.stat().st_mtime > _UNUSED_S and _is_outdated(one):
                # First by its name, so that nobody finds a part of it.
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
