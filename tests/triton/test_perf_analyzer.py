"""NVIDIA's perf_analyzer, with the inputs and command lines of ``perf_analyzer_configs``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import save_byte_tokenizer
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from running_server import running_server
from serving_client import ended_jobs, settle

CONFIGS = Path(__file__).parents[2] / "perf_analyzer_configs"
# The place where `make perf-analyzer` installs it.
PERF_ANALYZER = Path(sys.prefix, "perf_analyzer", "bin", "perf_analyzer")
RUN_TIMEOUT_S = 150.0
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def chat_endpoints(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoints]:
    """A server of its own, because a chat needs a template."""
    if not PERF_ANALYZER.exists():
        pytest.skip("no perf_analyzer: `make perf-analyzer` was not run, or failed")
    tokenizer = save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    log_path = tmp_path_factory.mktemp("perf_analyzer") / "server.log"
    config = tiny_config.with_keys(tokenizer=str(tokenizer))
    with running_server(config, log_path) as triton:
        yield triton.endpoints


def run(name: str, results: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the folder's own command line with other variables."""
    return subprocess.run(
        [str(CONFIGS / name / "run.sh")],
        env=os.environ
        | {"PERF_ANALYZER": str(PERF_ANALYZER), "PYTHON": sys.executable, "RESULTS": str(results)}
        | variables,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )


def experiment(profile: Path) -> dict[str, Any]:
    (one,) = json.loads(profile.read_text(encoding="utf-8"))["experiments"]
    return one


@pytest.mark.parametrize(
    ("name", "variables", "loads"),
    [
        pytest.param(
            "concurrency_sweep",
            {"CLIENTS": "1 3", "REQUESTS": "3"},
            {"clients_1": ("concurrency", 1, 3), "clients_3": ("concurrency", 3, 3)},
            id="concurrency_sweep",
        ),
        pytest.param(
            "poisson_rates",
            {"RATES": "4 8", "REQUESTS": "8"},
            {"rate_4": ("request_rate", 4, 8), "rate_8": ("request_rate", 8, 8)},
            id="poisson_rates",
        ),
        pytest.param(
            "replayed_intervals",
            {"REQUESTS": "6"},  # up to the first pause
            {"replay": ("request_rate", 1, 6)},  # its name for any schedule of its own
            id="replayed_intervals",
        ),
        pytest.param(
            "shared_prefix_chat",
            {"CLIENTS": "2", "REQUESTS": "4"},
            {"chat": ("concurrency", 2, 4)},
            id="shared_prefix_chat",
        ),
    ],
)
def test_all_requests_are_answered_in_full(
    name: str,
    variables: dict[str, str],
    loads: dict[str, tuple[str, int, int]],
    chat_endpoints: Endpoints,
    tmp_path: Path,
) -> None:
    settle(chat_endpoints)
    before = ended_jobs(chat_endpoints.metrics_url, "length")
    done = run(name, tmp_path, URL=chat_endpoints.grpc_url, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in tmp_path.iterdir()} == loads.keys()
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    for load, (mode, value, num_requests) in loads.items():
        one = experiment(tmp_path / f"{load}.json")
        assert one["experiment"] == {"mode": mode, "value": value}
        assert len(one["requests"]) == num_requests
        for request in one["requests"]:
            times = request["response_timestamps"]
            tokens = [output["num_output_tokens"] for output in request["response_outputs"]]
            asked = json.loads(request["request_inputs"]["sampling_parameters"])["max_tokens"]
            assert sum(tokens) == asked
            assert len(tokens) == len(times) <= asked
            assert request["timestamp"] < times[0]
            assert all(earlier <= later for earlier, later in pairwise(times))
        assert load in rows  # of the table of latencies
    total = sum(num_requests for _, _, num_requests in loads.values())
    settle(chat_endpoints)
    assert ended_jobs(chat_endpoints.metrics_url, "length") - before == total


def test_repeated_run_replaces_its_results(chat_endpoints: Endpoints, tmp_path: Path) -> None:
    # It fails if all of them end before it first reads the server's counts.
    for num_requests in (8, 6):
        done = run(
            "concurrency_sweep",
            tmp_path,
            URL=chat_endpoints.grpc_url,
            CLIENTS="1",
            REQUESTS=str(num_requests),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(experiment(tmp_path / "clients_1.json")["requests"]) == num_requests
        # run, max_tokens, requests, tokens
        table_row = done.stdout.splitlines()[-1].split()
        assert table_row[:4] == ["clients_1", "64", str(num_requests), str(64 * num_requests)]


def test_request_parameters_of_each_type(chat_endpoints: Endpoints, tmp_path: Path) -> None:
    (tmp_path / "input.json").write_text(
        json.dumps({"data": [{"text_input": ["Hello"], "stream": [True]}]}), encoding="utf-8"
    )
    command = [
        *(str(PERF_ANALYZER), "-m", "fastserve", "-u", chat_endpoints.grpc_url, "-i", "grpc"),
        *("--streaming", "--async", "--input-data", str(tmp_path / "input.json")),
        *("--concurrency-range", "2", "--request-count", "4"),
        *("--profile-export-file", str(tmp_path / "profile.json")),
        *("--request-parameter", "ignore_eos:true:bool"),
        *("--request-parameter", "return_num_output_tokens:true:string"),
        *("--request-parameter", "return_cumulative_logprob:true:string"),
        *("--request-parameter", "temperature:0.5:string"),
    ]
    for max_tokens, kind in ((5, "int"), (6, "string")):
        (tmp_path / "profile.json").unlink(missing_ok=True)
        done = subprocess.run(
            [*command, "--request-parameter", f"max_tokens:{max_tokens}:{kind}"],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        requests = experiment(tmp_path / "profile.json")["requests"]
        tokens = [
            sum(output["num_output_tokens"] for output in request["response_outputs"])
            for request in requests
        ]
        assert tokens == [max_tokens] * 4


def test_concurrency_that_grows_while_requests_run(
    chat_endpoints: Endpoints, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    done = subprocess.run(
        [
            *(str(PERF_ANALYZER), "-m", "fastserve", "-u", chat_endpoints.grpc_url, "-i", "grpc"),
            *("--streaming", "--async", "--profile-export-file", str(profile)),
            *("--input-data", str(CONFIGS / "concurrency_sweep" / "input.json")),
            *("--periodic-concurrency-range", "2:6:2", "--request-period", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tokens = [
        sum(output["num_output_tokens"] for output in request["response_outputs"])
        for request in experiment(profile)["requests"]
    ]
    assert tokens == [64] * 6


def test_run_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    stuck = tmp_path / "perf_analyzer"
    stuck.write_text("#!/bin/sh\nexec tail -f /dev/null\n", encoding="utf-8")
    stuck.chmod(0o755)
    done = run("poisson_rates", tmp_path, PERF_ANALYZER=str(stuck), DEADLINE="0.2")
    assert done.returncode == 124
    assert "perf_analyzer did not end within 0.2 s" in done.stderr


def test_missing_program_is_named_with_the_remedy(tmp_path: Path) -> None:
    done = run("poisson_rates", tmp_path, PERF_ANALYZER="/nowhere/perf_analyzer")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "PERF_ANALYZER: got /nowhere/perf_analyzer, which is no program; run: make perf-analyzer"
    ]


def test_table_refuses_what_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"experiments": [{"requests": []}]}', encoding="utf-8")
    command = [sys.executable, str(CONFIGS / "latencies.py"), str(path)]
    empty = subprocess.run(command, capture_output=True, text=True)
    assert (empty.returncode, empty.stderr) == (1, f"{path}: no requests in it\n")
    path.write_text("[]", encoding="utf-8")
    other = subprocess.run(command, capture_output=True, text=True)
    assert other.returncode == 1
    assert other.stderr.startswith(f"{path}: not a profile of these configurations")


@pytest.mark.parametrize(
    "inputs", ['{"max_tokens": 4, "return_num_output_tokens": true}', "[]"], ids=str
)
def test_table_refuses_requests_without_responses(tmp_path: Path, inputs: str) -> None:
    request = {
        "timestamp": 1,
        "request_inputs": {"sampling_parameters": inputs},
        "response_timestamps": [],
        "response_outputs": [],
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"experiments": [{"requests": [request]}]}), encoding="utf-8")
    command = [sys.executable, str(CONFIGS / "latencies.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path}: not a profile of these configurations")
    assert "Traceback" not in done.stderr
