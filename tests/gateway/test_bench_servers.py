"""``fastserve bench`` as a user types it, against real servers over both protocols."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from launched import is_serving
from refused_command import refused_command
from running_gateway import COMMAND, RunningGateway, running_gateway
from running_server import rank_stopped, running_server
from serving_client import (
    ended_jobs,
    metric,
    settle,
    unfinished_jobs,
    used_blocks,
    wait_until_idle,
)
from waiting import wait_for

BENCH = [*COMMAND[:-1], "bench"]
DEADLINE_S = 120.0


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*BENCH, "--pause", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def report_of(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def fragile(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server with a short queue, to be overloaded and killed."""
    config = tiny_config.with_keys(max_queued_requests=4)
    log_path = tmp_path_factory.mktemp("bench-fragile") / "server.log"
    with running_server(config, log_path) as triton:
        yield triton


def test_both_protocols_agree_with_what_the_server_counts(
    endpoints: Endpoints, gateway: RunningGateway, tmp_path: Path
) -> None:
    def counted() -> tuple[float, float]:
        url = endpoints.metrics_url
        return tuple(
            metric(url, f"fastserve_{kind}_tokens_total") for kind in ("prompt", "generation")
        )  # type: ignore[return-value]

    wait_until_idle(endpoints)
    before = counted()
    output, plot = tmp_path / "report.json", tmp_path / "sweep.png"
    done = bench(
        "--url", f"triton=grpc://{endpoints.grpc_url}", "--url", f"gateway={gateway.api_url}",
        "--rates", "20,40", "--num-jobs", "12", "--scale", "0.05", "--warmup", "0", "--seed", "3",
        "--output", str(output), "--plot", str(plot),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Ratios to triton" in done.stdout
    report = report_of(output)
    points = report["points"]
    assert [(point["label"], point["rate"]) for point in points] == [
        ("triton", 20.0), ("triton", 40.0), ("gateway", 20.0), ("gateway", 40.0),
    ]  # fmt: skip
    runs = [run for point in points for run in point["runs"]]
    jobs = [job for run in runs for job in run["records"]]
    assert len(jobs) == 48
    settle(endpoints)
    assert counted() == (
        before[0] + sum(job["prompt_tokens"] for job in jobs),
        before[1] + sum(job["output_tokens"] for job in jobs),
    )
    # Only Triton reports when a job first ran.
    assert all(job["first_scheduled_s"] is not None for job in runs[0]["records"])
    assert all(job["first_scheduled_s"] is None for job in runs[2]["records"])
    # All servers get the same jobs.
    lengths = [sorted((job["arrival_s"], job["output_tokens"]) for job in run["records"])
               for run in runs]  # fmt: skip
    assert lengths[0] == lengths[2]
    assert lengths[1] == lengths[3]
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.json", "sweep.png", "sweep_cdf.png", "sweep_timeline.png",
    }  # fmt: skip


def test_a_closed_loop_over_texts_that_end_by_themselves(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    records = [{"instruction": f"Say {number}", "output": "yes"} for number in range(5)]
    dataset = tmp_path / "alpaca.json"
    dataset.write_text(json.dumps(records), encoding="utf-8")
    done = bench(
        "--url", f"grpc://{endpoints.grpc_url}", "--dataset", str(dataset), "--concurrency", "1,3",
        "--num-jobs", "6", "--natural-lengths", "--max-output-tokens", "5", "--warmup", "1",
        "--output", str(tmp_path / "report.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    points = report_of(tmp_path / "report.json")["points"]
    assert [(point["concurrency"], point["num_jobs"]) for point in points] == [(1, 6), (3, 6)]
    assert not any(point["failures_by_kind"] for point in points)


def test_classes_reach_the_server_over_both_protocols(
    endpoints: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> list[float]:
        family = "fastserve_slo_attained_total"
        return [metric(endpoints.metrics_url, family, objective=one) for one in ("ttft", "tpot")]

    keys = tmp_path / "keys"
    # No other test has these tenants.
    keys.write_text("bench-chat:secret-1\nbench-batch:secret-2\n", encoding="utf-8")
    monkeypatch.setenv("CHAT_KEY", "secret-1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-2")
    output = tmp_path / "report.json"
    url = f"grpc://{endpoints.grpc_url}"
    wait_until_idle(endpoints)
    before = kept()
    with running_gateway(url, tmp_path / "log", "--api-keys-file", str(keys)) as gateway:
        done = bench(
            "--url", f"triton={url}", "--url", f"gateway={gateway.api_url}",
            "--class", "chat:1,ttft_slo_ms=60000,tpot_slo_ms=60000,tenant=bench-chat,"
            "key_variable=CHAT_KEY",
            "--class", "batch:1,priority=2,tenant=bench-batch,key_variable=OPENAI_API_KEY",
            "--rates", "40", "--num-jobs", "20", "--dataset", "equal:8:4", "--warmup", "0",
            "--output", str(output),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = report_of(output)
    for point in report["points"]:
        assert not point["failures_by_kind"]
        chat, batch = point["classes"]["chat"], point["classes"]["batch"]
        assert (chat["ttft_kept"], chat["tpot_kept"], batch["ttft_kept"]) == (1.0, 1.0, None)
        assert set(point["tenants"]) == {"bench-chat", "bench-batch"}
        assert 0.5 <= point["jain_index"] <= 1.0
    num_chat, num_batch = (2 * point["classes"][name]["num_jobs"] for name in ("chat", "batch"))
    assert num_chat + num_batch == 40
    settle(endpoints)
    assert kept() == [number + num_chat for number in before]
    for tenant, num_jobs in (("bench-chat", num_chat), ("bench-batch", num_batch)):
        tokens = metric(endpoints.metrics_url, "fastserve_tenant_tokens_total", tenant=tenant)
        assert tokens == num_jobs * (8 + 4)
    assert "secret" not in output.read_text(encoding="utf-8")


def test_a_full_disk_under_the_tables_is_one_line(endpoints: Endpoints, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [
        *BENCH, "--url", f"grpc://{endpoints.grpc_url}", "--concurrency", "2", "--num-jobs", "4",
        "--dataset", "equal:8:4", "--output", str(output),
    ]  # fmt: skip
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S
        )
    assert done.returncode == 1
    assert "error: cannot write the text: No space left on device\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert report_of(output)["points"][0]["num_jobs"] == 4


def test_ctrl_c_cancels_what_runs_and_reports_what_has_finished(
    server: TritonServer, tmp_path: Path
) -> None:
    endpoints = server.endpoints
    output = tmp_path / "report.json"
    # Half of the jobs have 2 tokens, the others more than this test has time for.
    dataset = tmp_path / "lengths.csv"
    dataset.write_text("prompt_tokens,output_tokens\n8,2\n8,3000\n")
    command = [
        *BENCH, "--url", f"grpc://{endpoints.grpc_url}", "--rates", "10", "--num-jobs", "1000",
        "--dataset", str(dataset), "--max-total-tokens", "4000", "--output", str(output),
    ]  # fmt: skip
    wait_until_idle(endpoints)
    before = ended_jobs(endpoints.metrics_url, "length")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            # Ten jobs more than the warm-up take seconds, so the client has seen the first one.
            wait_for(lambda: ended_jobs(endpoints.metrics_url, "length") >= before + 14, DEADLINE_S)
            with rank_stopped(server.runtime):
                settle(endpoints)
                number = unfinished_jobs(endpoints.metrics_url)
                # More jobs come all the time, and none of them ends.
                wait_for(lambda: unfinished_jobs(endpoints.metrics_url) >= number + 2, DEADLINE_S)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "jobs/s" in out
    (point,) = report_of(output)["points"]
    (run,) = point["runs"]
    assert run["interrupted"]
    assert run["records"]
    assert set(point["failures_by_kind"]) == {"cancelled"}
    wait_for(lambda: used_blocks(endpoints.metrics_url) == 0, DEADLINE_S)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "grpc://127.0.0.1:1", "--rates", "1"], "no model 'fastserve' is ready at"),
        (["--url", "http://127.0.0.1:1", "--rates", "1"], "no server at http://127.0.0.1:1/v1"),
        (["--rates", "1", "--concurrency", "1"], "concurrency: got it beside --rates"),
        (["--concurrency", "0"], "concurrency: got '0'; must be whole numbers from 1"),
        (["--natural-lengths", "--rates", "1"], "natural_lengths: needs --max-output-tokens"),
        (["--chat", "--rates", "1"], "chat: needs --natural-lengths"),
        (["--compare", "fcfs", "--rates", "1"], "compare: takes policies for --serve"),
        (["--serve", "x", "--compare", "mlfq,mlfq", "--rates", "1"], "compare: got mlfq, mlfq"),
        (["--serve", "x", "--compare", "mlfq,fsfc", "--rates", "1"], "compare: got 'fsfc'; polic"),
        (["--url", "http://h", "--url", "http://h", "--rates", "1"], "url: got http://h/v1, http"),
        (["--dataset", "[/x].csv", "--rates", "1"], "dataset: got '[/x].csv' (No such file"),
        (["--rates", "1", "--timeout", "inf"], "timeout: got inf; must be a number above 0"),
        (["--rates", "1", "--slo-ms", "inf"], "slo_ms: got inf; must be a number above 0"),
        (["--rates", "1", "--slo-ms", "nan"], "slo_ms: got nan; must be a number above 0"),
        (["--rates", "1", "--slo-ms", "0"], "slo_ms: got 0; must be a number above 0"),
        (["--rates", "1", "--ttft-slo-ms", "-5"], "ttft_slo_ms: got -5; must be a number above 0"),
        (["--rates", "1", "--tpot-slo-ms", "nan"], "tpot_slo_ms: got nan; must be a number above"),
        (["--rates", "1", "--class", "a,slo=1"], "class: a: got 'slo=1'; settings are priority=N"),
        (["--rates", "1", "--class", "a"], "class: got none of the shares or not all; sharegpt"),
        (
            ["--rates", "1", "--class", "a:1,key_variable=NO_SUCH_KEY"],
            "class: a: key_variable: got 'NO_SUCH_KEY'; the environment has no such variable",
        ),
        (["--rates", "1", "--output", "/"], "output: got '/'; it is a directory; name a file"),
        ([], "rate: got none; sharegpt has no timestamps of its own, give --rates, or to bench --"),
    ],
    ids=str,
)
def test_a_mistake_is_one_clear_error(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (line,) = refused_command(monkeypatch, capfd, "bench", *arguments).splitlines()
    assert line.startswith(f"error: {message}")


def test_a_model_that_the_server_does_not_have(gateway: RunningGateway) -> None:
    done = bench("--url", gateway.api_url, "--model", "nope", "--rates", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "model: got 'nope'" in done.stderr


def test_a_policy_runs_on_a_server_of_its_own(tiny_config: EngineConfig, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    model = tiny_config.model.model
    done = bench(
        "--serve", f"{model} --load-format dummy --dtype float32 --device cpu --device-blocks 64",
        "--compare", "fcfs", "--rates", "40", "--num-jobs", "5",
        "--dataset", "equal:8:4", "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (point,) = report_of(output)["points"]
    assert (point["label"], point["num_jobs"]) == ("fcfs", 5)
    assert not point["failures_by_kind"]


def test_a_full_queue_is_counted_over_both_protocols(fragile: TritonServer, tmp_path: Path) -> None:
    wait_for(lambda: is_serving(fragile, 0), DEADLINE_S)  # another test kills it
    output = tmp_path / "report.json"
    log_path = tmp_path / "gateway.log"
    with running_gateway(fragile.endpoints.grpc_url, log_path) as gateway:
        done = bench(
            "--url", f"triton=grpc://{fragile.endpoints.grpc_url}",
            "--url", f"gateway={gateway.api_url}", "--rates", "200", "--num-jobs", "40",
            "--dataset", "equal:16:900", "--warmup", "1", "--output", str(output),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for point in report_of(output)["points"]:
        assert set(point["failures_by_kind"]) == {"refused"}
        assert point["failures_by_kind"]["refused"] + len(point["runs"][0]["records"]) == 40
    assert "refused: HTTP 429: " in done.stderr


def test_a_server_that_dies_ends_the_run_with_errors(fragile: TritonServer, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    endpoints = fragile.endpoints
    command = [
        *BENCH, "--url", f"grpc://{endpoints.grpc_url}", "--concurrency", "2", "--num-jobs", "12",
        "--dataset", "equal:16:3000", "--max-total-tokens", "4000", "--output", str(output),
        "--warmup", "0",
    ]  # fmt: skip
    wait_for(lambda: is_serving(fragile, 0), DEADLINE_S)
    with (
        rank_stopped(fragile.runtime),  # so no job ends before
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            wait_for(lambda: unfinished_jobs(endpoints.metrics_url) >= 2, DEADLINE_S)
            assert fragile.pid is not None
            os.kill(fragile.pid, signal.SIGKILL)
            _, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 1, err
    (point,) = report_of(output)["points"]
    assert sum(point["failures_by_kind"].values()) == point["num_jobs"] == 12
    assert "unavailable" in point["failures_by_kind"]


def test_what_was_measured_before_a_server_is_gone_is_reported(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    # So many that the gateway is gone long before the last one.
    rates = ",".join(str(rate) for rate in range(20, 60))
    wait_until_idle(endpoints)
    before = ended_jobs(endpoints.metrics_url, "length")
    with running_gateway(endpoints.grpc_url, tmp_path / "gateway.log") as gateway:
        command = [
            *BENCH, "--url", f"triton=grpc://{endpoints.grpc_url}",
            "--url", f"gateway={gateway.api_url}", "--rates", rates, "--num-jobs", "5",
            "--dataset", "equal:16:20", "--warmup", "1", "--output", str(output),
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                # The warm-up of each server, and the first server's first run.
                wait_for(
                    lambda: ended_jobs(endpoints.metrics_url, "length") >= before + 2 + 1 + 5,
                    DEADLINE_S,
                )
                gateway.process.send_signal(signal.SIGTERM)
                _, err = process.communicate(timeout=DEADLINE_S)
            finally:
                process.kill()
    assert process.returncode == 1
    assert "ended; what has finished so far:" in err
    assert "error: " in err.splitlines()[-1]
    first = report_of(output)["points"][0]
    assert (first["label"], len(first["runs"][0]["records"])) == ("triton", 5)
