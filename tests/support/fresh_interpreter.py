"""What a new Python process has imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

TIMEOUT_S = 60.0


def loaded_modules(program: str) -> set[str]:
    """Full names of the modules that ``program`` leaves in a new interpreter."""
    program += "\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))
