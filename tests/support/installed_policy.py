"""The package of docs/adding_a_policy.md, and others, as if pip had installed them."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import fastserve_backend

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_policy.md"


def example() -> tuple[str, dict[str, str]]:
    """The page's module ``my_policies``, and its entry points."""
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    project = tomllib.loads(blocks["toml"])["project"]
    return blocks["python"], project["entry-points"]["fastserve.policies"]


def install_policies(
    folder: Path, module: str, entry_points: Mapping[str, str], package: str = "my-policies"
) -> None:
    """Puts ``my_policies`` and a package's metadata into a folder on the path."""
    (folder / "my_policies.py").write_text(module, encoding="utf-8")
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[fastserve.policies]", *lines, ""]))


def environment_with(folder: Path) -> dict[str, str]:
    """The environment of a process that finds packages installed into ``folder``."""
    backend = str(Path(fastserve_backend.__file__).parents[1])
    path = [str(folder), os.environ.get("PYTHONPATH", backend)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}
