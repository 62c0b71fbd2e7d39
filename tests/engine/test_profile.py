"""The latency profile on real ranks: the engine caches it, the command measures it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.profile.latency import LatencyProfile
from waiting import wait_for

# Each command imports torch and loads a model. A test has up to five of them.
COMMAND_TIMEOUT_S = 300.0
pytestmark = pytest.mark.timeout(900)
PROFILE = [sys.executable, "-m", "fastserve_backend", "profile"]


def run_profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROFILE, *arguments],
        env=os.environ | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


@pytest.mark.usefixtures("forked_ranks_here")
def test_the_engine_measures_once_and_corrects_itself(
    checkpoint: Path, tokenizer: Path, cache: Path
) -> None:
    keys = {"tokenizer": str(tokenizer), "max_num_seqs": 4, "device_blocks": 60}
    with LLM(str(checkpoint), **keys) as llm:
        (path,) = cache.iterdir()
        measured = LatencyProfile.load(path)
        profile = llm.engine.profile
        assert profile.model == measured
        assert 0 < profile.decode_s(1) <= profile.prefill_s(300)
        assert measured.identity.dtype == "float32"
        measured.require(llm.engine.model_config, llm.engine.config.parallel, 16)
        llm.generate([[5] * 8] * 4, SamplingParams(max_tokens=20, ignore_eos=True))
        assert profile.decode_ratio != 1.0  # it has seen these decodes
    as_if_quiet = replace(measured, busy=False)
    as_if_quiet.save(path)
    written_ns = path.stat().st_mtime_ns
    with LLM(str(checkpoint), **keys) as llm:
        assert llm.engine.profile.model == as_if_quiet
    assert path.stat().st_mtime_ns == written_ns


def test_the_command_writes_what_the_engine_then_uses(
    checkpoint: Path, tokenizer: Path, cache: Path
) -> None:
    done = run_profile(str(checkpoint), "--device-blocks", "60", "--max-num-seqs", "4")
    assert done.returncode == 0, done.stderr
    shown = re.search(r"mean absolute error (\d+\.\d)%", done.stdout)
    assert shown is not None, done.stdout
    assert "100%" in done.stderr  # the progress bar
    (path,) = cache.iterdir()
    assert str(path) in done.stdout
    profile = LatencyProfile.load(path)
    assert profile.held_out_error is not None
    assert f"{profile.held_out_error * 100:.1f}" == shown.group(1)
    assert profile.num_blocks == 60
    if profile.busy:  # else the engine measures again
        profile = replace(profile, busy=False)
        profile.save(path)
    keys = {"tokenizer": str(tokenizer), "device_blocks": 60, "max_num_seqs": 4}
    with LLM(str(checkpoint), **keys) as llm:
        assert llm.engine.profile.model == profile


def test_a_named_output_is_written_in_place(checkpoint: Path, tmp_path: Path) -> None:
    written, link = tmp_path / "written.json", tmp_path / "link.json"
    link.symlink_to(written)
    done = run_profile(
        str(checkpoint), "--device-blocks", "60", "--max-num-seqs", "2", "--output", str(link)
    )
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert LatencyProfile.load(written).num_blocks == 60


def test_sigterm_leaves_nothing_of_the_ranks(checkpoint: Path) -> None:
    # Its path is short, as the sockets in it need.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        process = subprocess.Popen(
            [*PROFILE, str(checkpoint), "--output", "/dev/null"],
            env=os.environ | {"TMPDIR": temporary},
            stderr=subprocess.DEVNULL,
        )
        with process:
            try:
                made = partial(Path(temporary).glob, "fastserve-ranks-*/*.sock")
                wait_for(lambda: any(made()), COMMAND_TIMEOUT_S)
                process.send_signal(signal.SIGTERM)
                assert process.wait(COMMAND_TIMEOUT_S) == 128 + signal.SIGTERM
            finally:
                process.kill()
        assert list(Path(temporary).iterdir()) == []


def test_bad_input_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "missing" / "profile.json"
    for arguments, expected in (
        ((str(checkpoint), "--output", str(output)), "output: "),
        ((str(checkpoint), "--output", str(tmp_path)), "it is a directory; name a file"),
        ((str(checkpoint), "--dtype", "int3"), "dtype"),
        (("no-such-model", "--load-format", "dummy"), "no-such-model"),
        ((str(checkpoint), "--device-blocks", "0"), "device_blocks"),
    ):
        done = run_profile(*arguments)
        assert done.returncode == 1, arguments
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
    assert not output.exists()


def test_a_cache_that_cannot_be_written_is_known_before_the_measurement(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fastserve").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run_profile(str(checkpoint))
    assert done.returncode == 1
    # There is one line, so no bar was shown.
    reason = f"cannot write to {tmp_path}/fastserve/profiles: Not a directory; give --output"
    assert done.stderr.startswith(f"error: output: got none, and {reason}"), done.stderr
    assert "\n" not in done.stderr.rstrip("\n")
