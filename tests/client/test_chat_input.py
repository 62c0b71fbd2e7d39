"""How ``fastserve chat`` reads its input."""

from __future__ import annotations

import os
import subprocess
import sys

DEADLINE_S = 60.0
_CHAT = """
from fastserve_chat.terminal_chat import chat_in_terminal
raise SystemExit(chat_in_terminal(url="grpc://127.0.0.1:1", system=None, timeout_s=5.0))
"""


def test_text_in_another_encoding_is_read() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHAT],
        input=b"gr\xfc\xdfe\n",
        capture_output=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert b"Traceback" not in done.stderr
    assert b"no server at grpc://127.0.0.1:1" in done.stderr
    assert done.returncode == 1
