"""Files of packages that are installed for their data alone."""

from __future__ import annotations

from importlib import util
from pathlib import Path


def packaged_file(package: str, path: str) -> Path | None:
    """The file at ``path`` within the package; None: there is none. No code of the package runs."""
    spec = util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / path).is_file():
            return Path(folder) / path
    return None
