"""What `make` prints with ``-n``, it does not run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = re.findall(r"^([a-z0-9_-]+):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_of_make_runs_nothing(target: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for name in ("pytest", "python", "ruff", "mypy", "pip", "fastserve"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho {name} >> {ran}\n")
        program.chmod(0o700)
    installed = tmp_path / "installed"
    installed.touch()
    variables = [f"BIN={tmp_path}", f"INSTALLED={installed}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(
        ["make", "-n", target, *variables], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not ran.exists(), ran.read_text()
