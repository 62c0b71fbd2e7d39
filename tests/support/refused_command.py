"""The command line with a mistake, in this process, which has imported what commands need."""

from __future__ import annotations

import pytest
from fastserve_backend.cli.app import main


def refused_command(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *words: str,
    exit_code: int = 1,
) -> str:
    """Runs ``fastserve`` with these words, which must end it with ``exit_code``; returns what it
    printed on standard error."""
    monkeypatch.setattr("sys.argv", ["fastserve", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == exit_code
    return capfd.readouterr().err
