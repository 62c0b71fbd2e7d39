"""The lock files have every package that is installed, with hashes."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy/locks"
# Those of the environment of `make install`, and of the two images.
EXTRAS = {
    "dev": frozenset({"server", "dev"}),
    "gateway": frozenset({"gateway", "traces"}),
    "triton": frozenset({"engine", "traces"}),
}
# Its build depends on the GPU.
WITHOUT_HASH = {"torch"}
PROJECT = "fastserve-triton"


def project_requirements() -> list[str]:
    """The project's requirements, with extras as conditions, as in a package's metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ofs = [
        (f'extra == "{name}"', one)
        for name, some in project["optional-dependencies"].items()
        for one in some
    ]
    return [*project["dependencies"], *(joined(one, condition) for condition, one in ofs)]


def joined(requirement: str, condition: str) -> str:
    package, _, marker = requirement.partition(";")
    return f"{package}; {condition} and ({marker})" if marker else f"{package}; {condition}"


def installed_for(extras: frozenset[str]) -> set[str]:
    """Canonical names of all packages that these extras of the project require, directly or not."""
    seen: set[tuple[str, str]] = set()
    pending = [(PROJECT, extra) for extra in ["", *extras]]
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            found = project_requirements() if name == PROJECT else requires(name) or []
        except PackageNotFoundError:
            continue  # of another platform, or not wanted here
        for requirement in map(Requirement, found):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted = canonicalize_name(requirement.name)
                pending += [(wanted, one) for one in ["", *requirement.extras]]
    return {name for name, _ in seen} - {PROJECT}


@pytest.mark.parametrize("name", EXTRAS)
def test_every_package_has_a_version(name: str) -> None:
    needed = installed_for(EXTRAS[name])
    assert len(needed) > 30
    assert needed - locked(name).keys() == WITHOUT_HASH & needed


def locked(name: str) -> dict[str, str]:
    """Versions by canonical names."""
    found = re.findall(
        r"(?m)^([\w.-]+)==(\S+)", (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    )
    return {canonicalize_name(package): version for package, version in found}


def test_all_environments_have_the_same_versions() -> None:
    dev = locked("dev")
    for path in LOCKS.glob("*.txt"):
        for package, version in locked(path.stem).items():
            assert dev.get(package, version) == version, (path.name, package)


def test_every_version_has_hashes() -> None:
    """pip refuses a file in which one is missing; here it is seen before an image is built."""
    for path in LOCKS.glob("*.txt"):
        lines = path.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
        packages = [line for line in lines if line and not line.startswith("#")]
        assert packages
        assert all("--hash=sha256:" in line for line in packages), path.name


def test_the_makefiles_versions_are_the_locked_ones() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in ("model", "encoder"):
        (wanted,) = re.findall(rf"(?m)^{name.upper()} := (\S+)", makefile)
        assert f"\n{wanted} " in (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
