"""constraints.txt pins every package that `make install` installs."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# The extras of one pip command; the Makefile installs other packages before.
EXTRAS = frozenset({"server", "dev"})
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


def test_every_package_has_a_version() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {canonicalize_name(name) for name in re.findall(r"(?m)^([\w.-]+)==", constraints)}
    needed = installed_for(EXTRAS)
    assert len(needed) > 50
    assert needed - pinned == set()
