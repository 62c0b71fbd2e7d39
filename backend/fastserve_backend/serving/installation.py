"""Finds a tritonserver: on PATH (NVIDIA's container), else in nvidia-pytriton."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from fastserve_backend.serving.errors import LaunchError

# Import roots that the server's stub and its children need, installed or in a source tree.
_PACKAGES = ("fastserve_backend", "fastserve_client", "fastserve_kernels")

_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")

_HELP_TIMEOUT_S = 30.0
# NVIDIA's containers have their release in this variable, such as 25.07.
_RELEASE_VARIABLE = "NVIDIA_TRITON_SERVER_VERSION"
_RELEASE = re.compile(r"(\d\d)\.(\d\d)")
_FIRST_MENDED = (25, 7)
_BUNDLED_RELEASE = "24.10"
"""Of the server in nvidia-pytriton, as long as its flags are no newer ones."""
_FLAG = re.compile(r"^  --([a-z0-9-]+)", re.MULTILINE)


@dataclass(frozen=True)
class TritonInstallation:
    """A tritonserver, and the files with which its python backend runs this interpreter's packages.

    ``bundle`` and ``stub`` are None for a server on PATH, which has its own backend directory.
    """

    binary: Path
    bundle: Path | None = None
    """Directory of the bundled python backend (read-only)."""
    stub: Path | None = None
    """Stub program built for the running version of Python."""
    libraries: tuple[Path, ...] = ()

    @classmethod
    def find(cls) -> TritonInstallation:
        """Raises LaunchError: there is no server, or none for this version of Python."""
        on_path = shutil.which("tritonserver")
        if on_path is not None:
            return cls(Path(on_path))
        pytriton = util.find_spec("pytriton")
        if pytriton is None or pytriton.origin is None:
            raise LaunchError(
                "no tritonserver found: put one on PATH (NVIDIA's Triton container has it) or "
                "`pip install nvidia-pytriton`"
            )
        # Importing it would take half a second.
        root = Path(pytriton.origin).parent / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.exists():
            raise LaunchError(
                f"the tritonserver in nvidia-pytriton has no stub for Python {version}; use one of "
                + ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
            )
        if shutil.which("bash") is None:
            raise LaunchError("tritonserver's python backend starts its stub with bash; install it")
        libdir = sysconfig.get_config_var("LIBDIR")
        libraries = [root.parent.parent / "nvidia_pytriton.libs"]
        if libdir:
            libraries.append(Path(libdir))
        binary = root / "bin" / "tritonserver"
        return cls(binary, root / "backends" / "python", stub, tuple(libraries))

    def offered_flags(self) -> frozenset[str]:
        """The names in the server's ``--help``, which differ between releases.

        Raises LaunchError: the server cannot be run.
        """
        command = [str(self.binary), "--help"]
        environment = self.environment(os.environ)
        try:
            answer = subprocess.run(
                command, env=environment, capture_output=True, timeout=_HELP_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"cannot run {self.binary}: {error}") from None
        return frozenset(_FLAG.findall((answer.stdout + answer.stderr).decode(errors="replace")))

    def old_release(self) -> str | None:
        """The server's release if it is older than 25.07, whose HTTP port no client can crash with
        many chunks any more. Else None.

        A server that is not from NVIDIA's container shows its age by its flags alone. They are the
        same in 25.06 and 25.07, so there 25.06 counts as 25.07.

        Raises LaunchError: the server cannot be run.
        """
        named = None if self.bundle is not None else os.environ.get(_RELEASE_VARIABLE)
        if "http-max-input-size" not in self.offered_flags():  # since 25.06
            return _BUNDLED_RELEASE if self.bundle is not None else named or "before 25.06"
        match = _RELEASE.match(named or "")
        is_old = match is not None and tuple(map(int, match.groups())) < _FIRST_MENDED
        return named if is_old else None

    def prepare_backends(self, directory: Path) -> list[str]:
        """Copy the python backend to ``directory``, and return the server's flags for it.

        The server refuses a backend whose library is a symbolic link out of its directory, so the
        library is copied. All else is copied with it, so that the directory needs no other.
        """
        if self.bundle is None or self.stub is None:
            return []
        target = directory / "python"
        target.mkdir(parents=True, mode=0o700)
        for name in _BACKEND_FILES:
            shutil.copy(self.bundle / name, target / name)
        shutil.copy(self.stub, target / self.stub.name)
        return [f"--backend-directory={directory}"]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with the paths that the server, its stub and the ranks need.

        The stub embeds Python: it finds this interpreter's site-packages through the first
        ``python3`` on PATH, and libpython through LD_LIBRARY_PATH.
        """
        environment = dict(base)
        _prepend(environment, "PATH", [Path(sys.executable).parent])
        _prepend(environment, "LD_LIBRARY_PATH", self.libraries)
        _prepend(environment, "PYTHONPATH", _import_roots())
        return environment


def _import_roots() -> list[Path]:
    roots: list[Path] = []
    for package in _PACKAGES:
        spec = util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        root = Path(next(iter(spec.submodule_search_locations))).resolve().parent
        if root not in roots and root.name not in ("site-packages", "dist-packages"):
            roots.append(root)
    return roots


def _prepend(
    environment: dict[str, str], variable: str, paths: tuple[Path, ...] | list[Path]
) -> None:
    old = environment.get(variable)
    parts = [str(path) for path in paths] + ([old] if old else [])
    if parts:
        environment[variable] = os.pathsep.join(parts)
