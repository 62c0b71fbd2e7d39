"""``fastserve simulate`` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.config_sections import ParallelSection
from fastserve_backend.profile.latency import Curve, Identity, LatencyProfile
from fastserve_backend.rank_protocol.link import Link
from refused_command import refused_command

SIMULATE = [sys.executable, "-m", "fastserve_backend", "simulate"]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SIMULATE, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_sweep_prints_a_table_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    output, plot = tmp_path / "report.json", tmp_path / "sweep.png"
    done = simulate(
        "opt-13b", "--rates", "1,4", "--num-jobs", "40", "--policies", "fcfs,srpt,speculative",
        "--prediction-error", "0.5", "--max-output-tokens", "500",
        "--output", str(output), "--plot", str(plot),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fcfs") == done.stdout.count("srpt") == 2
    assert done.stderr.count("speculative: aging 0.1") == 1
    assert "3936 KV blocks of 16 tokens" in done.stderr
    report = json.loads(output.read_text())
    assert [(point["label"], point["rate"]) for point in report["points"]] == [
        ("fcfs", 1.0), ("fcfs", 4.0), ("srpt", 1.0), ("srpt", 4.0),
        ("speculative", 1.0), ("speculative", 4.0),
    ]  # fmt: skip
    assert report["settings"]["prediction_error"] == 0.5
    assert report["settings"]["cluster"]["hardware"] == "a100-80g"
    assert report["settings"]["workload"]["limits"]["max_output_tokens"] == 500
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_classes_and_tenants_have_tables_of_their_own() -> None:
    done = simulate(
        "opt-125m", "--rates", "5", "--num-jobs", "40", "--policies", "fcfs",
        "--class", "chat:0.5,priority=-1,ttft_slo_ms=1e6", "--class", "batch:0.5,tenant=b",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(" fcfs")]
    assert [row[2] for row in rows[1:]] == ["batch", "chat", "–", "b"]
    assert rows[2][5] == "100.0%"


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [{"COLUMNS": "25"}, {"COLUMNS": "80"}, {}], ids=str)
def test_a_table_is_as_wide_as_it_has_to_be(terminal: dict[str, str]) -> None:
    command = [*SIMULATE, "opt-125m", "--rates", "5", "--num-jobs", "5"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment | terminal
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [len(row) for row in rows if row[:2] == ["skip_join_mlfq", "5"]] == [12]
    assert "…" not in done.stdout


def test_files_are_written_where_nobody_reads_the_table(tmp_path: Path) -> None:
    reader, stdout = os.pipe()
    os.close(reader)
    done = simulate_to(stdout, tmp_path / "report.json")
    os.close(stdout)
    assert done.returncode == 141, done.stderr
    assert "error" not in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["points"]


def test_a_full_disk_under_the_table_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = simulate_to(full.fileno(), tmp_path / "report.json")
    assert done.returncode == 1
    assert done.stderr.endswith("\nerror: cannot write the text: No space left on device\n")
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["points"]


def simulate_to(stdout: int, output: Path) -> subprocess.CompletedProcess[str]:
    command = [*SIMULATE, "opt-125m", "--rates", "5", "--num-jobs", "5", "--output", str(output)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)


def test_a_pipeline_of_sharded_stages_and_a_length_ratio() -> None:
    done = simulate(
        "opt-175b", "--rates", "1", "--num-jobs", "20", "--policies", "skip_join_mlfq",
        "--tensor-parallel-size", "8", "--pipeline-parallel-size", "2",
        "--dataset", "alpaca", "--length-ratio", "0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "skip_join_mlfq: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "lifo"], "scheduler.policy: got 'lifo'"),
        (["--quantum-ratio", "1"], "scheduler.quantum_ratio: got 1.0"),
        (["--rates", "-1"], "rate: got -1; must be"),
        (["--rates", "fast"], "rates: got 'fast'; must be numbers"),
        (["--num-jobs", "0"], "num_jobs: got 0"),
        (["--dataset", "equal:2000:100", "--max-prompt-tokens", "2048",
          "--max-total-tokens", "4096"], "2000 prompt + 100 output tokens; must be at most 2048"),
        (["--device-blocks", "2"], "must be at most 32 together (device_blocks)"),
        (["--dtype", "float32"], "those of float16 and bfloat16, give --dtype bfloat16"),
        (["--dataset", "missing.csv"], "dataset: got 'missing.csv'"),
        (["--profile", "missing.json"], "profile: cannot read missing.json"),
        (["--hardware", "tpu"], "hardware: got 'tpu'"),
        (["--prediction-error", "-0.5"], "prediction_error: got -0.5; must be from 0 to 10"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size: got 3"),
        (["--output", "missing/report.json"], "its directory does not exist"),
        (["--plot", "sweep.pdf"], "'sweep.pdf'; must end in .png or .svg"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_one_clear_error(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rates = [] if "--rates" in arguments else ["--rates", "1"]
    stderr = refused_command(monkeypatch, capfd, "simulate", "opt-13b", *rates, *arguments)
    assert message in stderr
    assert "Traceback" not in stderr


@pytest.fixture
def profile_path(tmp_path: Path) -> Path:
    """A profile of OPT-125M in float16, in blocks of 32 tokens."""
    model = load_model_config("opt-125m", load_format="dummy")
    measured = Identity.of(
        model, hardware="a slide rule", dtype="float16", block_size=32, parallel=ParallelSection()
    )
    path = tmp_path / "profile.json"
    LatencyProfile(
        identity=measured, num_blocks=100, link=Link(1e-4, 1e-4), num_samples=0,
        held_out_error=None, base_s=0.004, tokens=Curve((0,), (1e-4,)),
        sampled=Curve((0,), (1e-4,)), decode_context_s=1e-7, prefill_pair_s=1e-9,
    ).save(path)  # fmt: skip
    return path


@pytest.mark.slow
def test_a_profile_is_of_its_blocks_and_its_dtype(profile_path: Path) -> None:
    arguments = ("opt-125m", "--rates", "1", "--num-jobs", "5", "--profile", str(profile_path))
    done = simulate(*arguments, "--block-size", "32", "--swap-space-gib", "1")
    assert done.returncode == 0, done.stderr
    # Bytes of a block: 12 layers, keys and values, 768 channels, 32 tokens, 2 bytes each.
    assert f"100 KV blocks of 32 tokens and {2**30 // (12 * 2 * 768 * 32 * 2)} on" in done.stderr
    for wrong, message in {
        (): "was measured with block_size 32, not 16; set kv_cache.block_size",
        ("--dtype", "float32", "--block-size", "32"): "with dtype float16, not float32; set model",
    }.items():
        refused = simulate(*arguments, *wrong)
        assert refused.returncode == 1
        assert message in " ".join(refused.stderr.split())


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("prompt_tokens,output_tokens\n")
    done = simulate("opt-13b", "--rates", "1", "--dataset", str(tmp_path / "empty.csv"))
    assert done.returncode == 1
    assert "empty.csv" in done.stderr
    assert "Traceback" not in done.stderr


def test_windows_leave_a_long_job_few_blocks() -> None:
    done = simulate("gemma-3-1b", "--rates", "4", "--num-jobs", "5", "--policies", "fcfs")
    assert done.returncode == 0, done.stderr
    assert (
        "each has 4 of the 26 layers, and a job of 32768 tokens holds 2240 of them, not 14336"
        in done.stderr
    )
