"""What every command does before its own work: closed streams, bad options, early Ctrl-C."""

from __future__ import annotations

import subprocess
import sys

import pytest
from refused_command import refused_command

DEADLINE_S = 150.0
FASTSERVE = f"{sys.executable} -m fastserve_backend"
_UNUSED_URL = "--url grpc://127.0.0.1:1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (f"generate hi {_UNUSED_URL} >&-", 1, "error: no server at grpc://127.0.0.1:1"),
        (f"generate hi {_UNUSED_URL} <&- >&-", 1, "error: no server at grpc://127.0.0.1:1"),
        (f"chat {_UNUSED_URL} <&-", 0, ""),
        (f"chat {_UNUSED_URL} <&- >&- 2>&-", 0, ""),
        (f"chat {_UNUSED_URL} >&-", 1, "error: no server at grpc://127.0.0.1:1"),
        ("generate --help >&-", 0, ""),
        ("generate --help 2>&-", 0, ""),
    ],
)
def test_a_closed_stream_is_one_that_says_and_takes_nothing(
    command: str, code: int, message: str
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"{FASTSERVE} {command}"],
        input="hello\n",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == bool(message)


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("bench", "--seed", "-1")]
    + [("gateway", "--keep-alive-s", value) for value in ("0", "-1", "100000", "nan", "soon")],
)
def test_an_option_out_of_its_range_is_named(
    command: str,
    option: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stderr = refused_command(monkeypatch, capfd, command, option, value, exit_code=2)
    assert f"Invalid value for '{option}'" in stderr


def test_a_process_that_is_started_gets_the_streams_too() -> None:
    program = (
        "import os; from fastserve_backend.system.standard_streams import open_closed_streams\n"
        "open_closed_streams(); "
        "os.execvp('readlink', ['readlink', '/proc/self/fd/0', '/proc/self/fd/2'])"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f'{sys.executable} -c "{program}" <&- 2>&-'],
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == "/dev/null\n/dev/null\n"


# Ctrl-C comes when the command line imports one of its packages.
_INTERRUPTED = """
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

# A shell that starts the tests in the background makes them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["fastserve", "generate", "hi"]
runpy.run_module("fastserve_backend", run_name="__main__")
"""


def test_ctrl_c_during_the_imports_is_quiet() -> None:
    command = [sys.executable, "-c", _INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
