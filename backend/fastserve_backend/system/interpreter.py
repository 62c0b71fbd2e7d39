"""Which Python runs this code, and how another process runs the same code."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def python_executable() -> str:
    """The interpreter that runs this code, also where Python is embedded in another program."""
    running = Path(sys.executable or "")
    if running.name.startswith("python"):
        return str(running)
    return str(Path(sys.prefix) / "bin" / "python3")


def child_environment() -> dict[str, str]:
    """For a process that imports what this process imports, whatever path it was set up with."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return os.environ | {"PYTHONPATH": path}
