"""Which Python runs this code."""

from __future__ import annotations

import sys
from pathlib import Path


def python_executable() -> str:
    """The interpreter that runs this code, also where Python is embedded in another program."""
    running = Path(sys.executable or "")
    if running.name.startswith("python"):
        return str(running)
    return str(Path(sys.prefix) / "bin" / "python3")
