"""Flags of tritonserver that only some releases have. A script stands in for each release."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.errors import LaunchError
from fastserve_backend.serving.installation import TritonInstallation
from fastserve_backend.serving.process import ServerProcess
from fastserve_backend.serving.runtime import RuntimeDirectory, wait_readable

FORWARDED = "--grpc-header-forward-pattern=^(triton_grpc_error|traceparent|tracestate)$"
FORWARDED_TRACES = "--grpc-header-forward-pattern=^(traceparent|tracestate)$"
LIMITED = "--http-max-input-size=33554432"
LOCKED = "--allow-client-shm=false"


def write_server(path: Path, offered: list[str]) -> Path:
    """A program that writes its arguments to the file ``arguments`` beside it, and ends.

    Its help is as real ones': on standard error, with the exit code 1, and flags named in the
    descriptions of others.
    """
    lines = ["Usage: tritonserver [options]", "", "HTTP:"]
    lines += [f"  --{name} <integer>\n\tSets it. See --no-flag-of-its-own." for name in offered]
    path.write_text(
        "#!/bin/sh\n"
        "if [ \"$1\" = --help ]; then cat >&2 <<'END'\n" + "\n".join(lines) + "\nEND\n"
        "exit 1; fi\n"
        f'printf "%s\\n" "$@" >{path.parent}/arguments\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("offered", "used"),
    [
        ([], [FORWARDED]),
        (["http-max-input-size"], [FORWARDED, LIMITED]),
        (["http-max-input-size", "allow-client-shm"], [LIMITED, LOCKED, FORWARDED_TRACES]),
    ],
    ids=["24.10", "25.06", "26.04"],
)
def test_the_server_gets_the_flags_that_it_offers(
    offered: list[str], used: list[str], tmp_path: Path
) -> None:
    installation = TritonInstallation(write_server(tmp_path / "tritonserver", offered))
    runtime = RuntimeDirectory.create()
    endpoints = Endpoints("127.0.0.1", 1, 2, 3)
    server = ServerProcess(
        installation, runtime, endpoints, tmp_path / "log", [], {}, loads_others=False
    )
    try:
        assert wait_readable(120.0, server.handle)
    finally:
        server.stop(kill=True)
        runtime.remove()
    given = (tmp_path / "arguments").read_text().splitlines()
    assert sorted({FORWARDED, FORWARDED_TRACES, LIMITED, LOCKED}.intersection(given)) == sorted(
        used
    )


def test_only_the_names_of_flags_count_as_offered(tmp_path: Path) -> None:
    installation = TritonInstallation(write_server(tmp_path / "tritonserver", ["http-port", "id"]))
    assert installation.offered_flags() == {"http-port", "id"}


def test_a_server_that_cannot_be_run_says_which(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"cannot run {tmp_path}/tritonserver: "):
        TritonInstallation(tmp_path / "tritonserver").offered_flags()
