"""Flags of tritonserver that only some releases have. A script stands in for each release."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.errors import LaunchError, OldTritonError
from fastserve_backend.serving.installation import TritonInstallation
from fastserve_backend.serving.process import ServerProcess
from fastserve_backend.serving.public_host import check_public_host
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


@pytest.mark.parametrize(
    ("offered", "container", "old"),
    [
        ([], None, "before 25.06"),
        ([], "24.10", "24.10"),
        (["http-max-input-size"], "25.06", "25.06"),
        (["http-max-input-size"], "25.07", None),
        (["http-max-input-size"], "26.10", None),
        (["http-max-input-size"], None, None),  # which of them cannot be known
    ],
)
def test_others_do_not_reach_a_server_that_they_can_crash(
    offered: list[str],
    container: str | None,
    old: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("NVIDIA_TRITON_SERVER_VERSION", raising=False)
    if container is not None:
        monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", container)
    installation = TritonInstallation(write_server(tmp_path / "tritonserver", offered))
    check_public_host("127.0.0.1", installation, allow_old_triton=False)
    assert not caplog.text
    if old is not None:
        message = f"host: got 0.0.0.0 with tritonserver {old}, .*25.07 or later.*--allow-old-triton"
        with pytest.raises(OldTritonError, match=message):
            check_public_host("0.0.0.0", installation, allow_old_triton=False)
    check_public_host("0.0.0.0", installation, allow_old_triton=old is not None)
    assert "without any authentication" in caplog.text
