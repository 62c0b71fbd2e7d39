"""Compiles the C++ kernels into the user's cache, once for each machine and source version.

``python -m fastserve_kernels.cpu.builder`` does this ahead of their use. It imports no torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import util
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "src"
COMPILE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    # Results must be the same in every build: always fuse multiply-adds, reorder nothing.
    "-ffp-contract=fast",
)
AMX_FLAG = "-DFASTSERVE_AMX"
"""Enables AMX instructions, if the compiler knows them and the processor has them."""
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
COMPILE_TIMEOUT_S = 300
"""A build takes about 20 s on an idle core. This limit allows for a badly overloaded machine."""
_WORK_PREFIX = "build-"
_BUILD_BYTES = 16 << 20
"""More than the files of a build take."""


class BuildError(RuntimeError):
    """The kernels cannot be compiled or cached here. The message says why."""


def find_compiler() -> str:
    """Path of the C++ compiler: `$CXX`, else g++, else c++. Raises BuildError if there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C++ compiler found: install g++, or set CXX to one")


def torch_openmp() -> Path | None:
    """The libgomp that torch loads. With it, kernels and torch share one thread pool."""
    torch = util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    libraries = Path(torch.origin).resolve().parent / "lib"
    return next(iter(sorted(libraries.glob("libgomp*.so*"))), None)


def may_use_amx() -> bool:
    """Ask Linux to let this process use AMX's tile registers, as it must before their first use.

    False if the processor or Linux (before 5.16, or not x86-64) does not support them. See
    "Dynamically enabled XSTATE features" in Linux's documentation.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    request = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return bool(ctypes.CDLL(None).syscall(*map(ctypes.c_long, request)) == 0)


def cache_dir() -> Path:
    """The private folder for compiled kernels, created if missing.

    Raises:
        BuildError: it cannot be created, or others can write to it. Its files are loaded as code.
    """
    root = user_cache() / "fastserve"
    folder = root / "kernels"
    for one in (root, folder):
        try:
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_private = _is_private(one)
        except OSError as error:
            raise _unusable(folder, error) from error
        if not is_private:
            raise BuildError(
                f"cache folder {one} must be yours, and writable by you only; run `chmod go-w "
                f"{one}`, or set XDG_CACHE_HOME to another directory"
            )
    return folder


def _is_private(path: Path) -> bool:
    """Whether this user owns the file or folder, and nobody else can write to it."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def user_cache() -> Path:
    """The user's cache folder, as in platformdirs and XDG's specification. A relative path counts
    as missing. Raises BuildError if there is none."""
    chosen, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if os.path.isabs(chosen):
        return Path(chosen)
    if not os.path.isabs(home):
        with suppress(KeyError):  # the user has no entry there
            home = pwd.getpwuid(os.getuid()).pw_dir
    if not os.path.isabs(home):
        raise BuildError(
            f"no cache folder: user {os.getuid()} has no home directory; set HOME or "
            "XDG_CACHE_HOME to an absolute path"
        )
    return Path(home) / ".cache"


def build() -> Path:
    """The compiled library, built now unless it is cached. Raises BuildError.

    Its name has a hash of everything that the machine code depends on. If another process builds,
    this waits for it.
    """
    compiler = find_compiler()
    openmp = torch_openmp()
    flags = (*COMPILE_FLAGS, AMX_FLAG) if may_use_amx() else COMPILE_FLAGS
    folder = cache_dir()
    _remove_leftovers(folder)
    target = folder / f"fastserve_kernels-{_build_key(compiler, flags, openmp)}.so"
    try:
        if not _is_built(target):
            with _only_build_in(folder):
                if not _is_built(target):  # now either
                    _make(target, compiler, flags, openmp)
    except OSError as error:
        raise _unusable(folder, error) from error
    return target


def _is_built(target: Path) -> bool:
    """Whether there is a library, and this user built it."""
    return target.exists() and _is_private(target)


@contextmanager
def _only_build_in(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not every file system has locks; then processes build twice
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove folders of builds whose process was killed. A running build is never so old."""
    for work in folder.glob(f"{_WORK_PREFIX}*"):
        with suppress(OSError):  # another process removes it too
            if time.time() - work.stat().st_mtime > COMPILE_TIMEOUT_S:
                shutil.rmtree(work, ignore_errors=True)


def _make(target: Path, compiler: str, flags: tuple[str, ...], openmp: Path | None) -> None:
    """Raises BuildError, or OSError if the folder cannot hold the files."""
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_WORK_PREFIX) as work:
        # On a full disk, the compiler would work for a minute before it notices.
        with tempfile.TemporaryFile(dir=work) as room:
            os.posix_fallocate(room.fileno(), 0, _BUILD_BYTES)
        objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
        compile_only = [compiler, *flags, "-c", "-o"]
        commands = [
            [*compile_only, output, str(source)]
            for output, source in zip(objects, sources, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            for _ in pool.map(_compile, commands):
                pass
        library = str(Path(work) / "kernels.so")
        # No -fopenmp when linking: it would add the compiler's own libgomp to torch's.
        _compile([compiler, "-shared", "-o", library, *objects, str(openmp or "-fopenmp")])
        with open(library, "rb") as built:
            # Loading half a library, left by a crash of the machine, would kill the process.
            os.fsync(built.fileno())
        os.chmod(library, 0o700)  # whatever the user's mask is
        os.replace(library, target)


def _unusable(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"cache folder {folder} is unusable: {error}; set XDG_CACHE_HOME to a directory that can "
        "be written to"
    )


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")


def _build_key(compiler: str, flags: tuple[str, ...], openmp: Path | None) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} failed: {error}") from error
    parts = (*flags, compiler, str(openmp), platform.machine(), _cpu_model())
    digest.update(version + "\0".join(parts).encode())
    return digest.hexdigest()[:24]


def _cpu_model() -> str:
    """What -march=native depends on. Different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "features", "cpu part")
    first_core = lines[: lines.index("")] if "" in lines else lines
    return "\n".join(line for line in first_core if line.lower().startswith(wanted))


if __name__ == "__main__":
    with suppress(BuildError):  # whoever needs the kernels says why there are none
        build()
