from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fastserve_bench.workload import (
    NO_LIMITS,
    LengthLimits,
    TraceJob,
    Workload,
    estimate_tokens,
    load_lengths,
)
from fastserve_client.errors import WorkloadError

_AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
2023-11-16 18:17:03.9799601,55,0
2023-11-16 18:17:05.9799600,3180,8
"""


def _write(folder: Path, text: str, name: str = "data") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal_of(dataset: str, limits: LengthLimits = NO_LIMITS) -> str:
    with pytest.raises(WorkloadError) as error:
        load_lengths(dataset, limits)
    return str(error.value)


def test_equal_jobs() -> None:
    assert load_lengths("equal:512:64") == [(512, 64)]


@pytest.mark.parametrize("dataset", ["equal:0:5", "equal:5", "equal:5:-1", "equal:1:2:3"])
def test_equal_jobs_need_two_positive_integers(dataset: str) -> None:
    assert refusal_of(dataset) == (
        f"dataset: got {dataset!r}; must be equal:PROMPT:OUTPUT with two positive integers"
    )


@pytest.mark.parametrize(
    "text",
    [
        "prompt_tokens,output_tokens\n74,918\n290,905\n",
        "\ufeffoutput_tokens, id, prompt_tokens\r\n918, a, 74\r\n\r\n905, b, 290",
    ],
)
def test_csv_of_lengths(tmp_path: Path, text: str) -> None:
    assert load_lengths(_write(tmp_path, text)) == [(74, 918), (290, 905)]


@pytest.mark.parametrize(
    ("line", "column", "got"),
    [
        ("7", "output_tokens", "nothing"),
        ("7,", "output_tokens", "''"),
        ("0,3", "prompt_tokens", "'0'"),
        ("-4,3", "prompt_tokens", "'-4'"),
        ("4,3.5", "output_tokens", "'3.5'"),
        ("4,1_000", "output_tokens", "'1_000'"),
    ],
)
def test_malformed_csv_lines_are_named(tmp_path: Path, line: str, column: str, got: str) -> None:
    path = _write(tmp_path, f"prompt_tokens,output_tokens\n1,2\n{line}\n")
    assert refusal_of(path) == f"{path}:3: {column}: got {got}; must be an integer from 1"


def test_other_headers_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, "input,output\n1,2\n")
    assert refusal_of(path) == (
        f"{path}:1: got 'input,output'; must be the header prompt_tokens,output_tokens "
        "or TIMESTAMP,ContextTokens,GeneratedTokens or Timestamp,Request tokens,Response tokens, "
        "or JSON"
    )


@pytest.mark.parametrize("before", ["", "prompt_tokens,output_tokens\n1,2\n"])
def test_csv_that_csv_cannot_be(tmp_path: Path, before: str) -> None:
    path = _write(tmp_path, before + "x" * 200_000)
    with pytest.raises(WorkloadError, match=r":\d: not CSV \(field larger than field limit"):
        load_lengths(path)


def test_azure_traces_keep_their_timestamps(tmp_path: Path) -> None:
    path = _write(tmp_path, _AZURE)
    # The third job generated nothing.
    assert load_lengths(path) == [(4808, 10), (110, 27), (3180, 8)]
    assert Workload(path, 3).trace(None) == [
        TraceJob(0.0, 4808, 10),
        TraceJob(0.052, 110, 27),
        TraceJob(2.0, 3180, 8),
    ]


def test_azure_traces_are_rescaled_to_a_rate_and_cut_to_a_number(tmp_path: Path) -> None:
    path = _write(tmp_path, _AZURE)
    trace = Workload(path, 3).trace(10.0)
    assert [job.arrival_s for job in trace] == pytest.approx([0.0, 0.0052, 0.2])
    assert Workload(path, 2).trace(None) == Workload(path, 3).trace(None)[:2]
    assert [job.arrival_s for job in Workload(path, 2).trace(10.0)] == pytest.approx([0.0, 0.1])
    with pytest.raises(WorkloadError, match=r"^num_jobs: got 4; must be at most 3, the jobs that"):
        Workload(path, 4).trace(None)
    with pytest.raises(WorkloadError, match=r"^num_jobs: got 0; must be at least 1"):
        Workload(path, 0).trace(None)


def test_azure_traces_begin_with_the_first_job_within_the_limits(tmp_path: Path) -> None:
    path = _write(tmp_path, _AZURE)
    trace = Workload(path, 2, limits=LengthLimits(max_prompt_tokens=4000)).trace(None)
    assert trace == [
        TraceJob(0.0, 110, 27),
        TraceJob(pytest.approx(1.948), 3180, 8),  # type: ignore[arg-type]
    ]


def test_azure_timestamps_are_exact_and_may_have_zones(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10T02:00:01+02:00,1,1\n"
        "2024-05-10 00:00:01.000001+00:00,2,1\n"
        "2024-05-10T00:00:01.0000019Z,3,1\n",
    )
    assert Workload(path, 3).trace(None) == [
        TraceJob(0.0, 1, 1),
        TraceJob(1e-6, 2, 1),
        TraceJob(1.9e-6, 3, 1),
    ]


@pytest.mark.parametrize("timestamp", ["yesterday", "2023-13-16 18:17:03.1", "", "1700000000"])
def test_malformed_timestamps_are_named(tmp_path: Path, timestamp: str) -> None:
    path = _write(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{timestamp},1,1\n")
    assert refusal_of(path) == (
        f"{path}:2: TIMESTAMP: got {timestamp!r}; must be like 2023-11-16 18:17:03.9799600"
    )


_CONVERSATIONS = [
    {
        "id": "a",
        "conversations": [
            {"from": "gpt", "value": "left over from before"},
            {"from": "human", "value": "one two"},
            {"from": "gpt", "value": "three"},
            {"from": "human", "value": "asked twice"},
            {"from": "human", "value": "an only question"},
            {"from": "gpt", "value": "e f"},
            {"from": "human", "value": "no answer"},
        ],
    },
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}]},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_pairs_of_human_and_gpt(tmp_path: Path, indent: int | None) -> None:
    path = _write(tmp_path, "\n" + json.dumps(_CONVERSATIONS, indent=indent))
    assert load_lengths(path) == [(2, 2), (4, 1)]


_INSTRUCTIONS = [
    {"instruction": "Add up", "input": "1 2 3", "output": "6"},
    {"instruction": "Say a word or two", "input": "", "output": "Hi there"},
    {"instruction": "Say nothing", "input": "", "output": ""},
    {"instruction": "No input key", "output": "fine"},
]


@pytest.mark.parametrize("lines", [False, True])
def test_alpaca_instructions(tmp_path: Path, lines: bool) -> None:
    if lines:
        text = "\n\n".join(json.dumps(record) for record in _INSTRUCTIONS)
    else:
        text = json.dumps(_INSTRUCTIONS)
    path = _write(tmp_path, text)
    assert load_lengths(path) == [(3, 1), (5, 2), (3, 1)]


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    path = _write(tmp_path, r'{"instruction": "cut \ud83c", "output": "\udf89 off"}')
    assert load_lengths(path) == [(2, 2)]
    (job,) = Workload(path, 1).trace(1.0)
    assert job.prompt == "cut ?"


def test_tokens_are_estimated(tmp_path: Path) -> None:
    record = {"instruction": "12345", "output": "ää"}
    assert load_lengths(_write(tmp_path, json.dumps(record))) == [(2, 1)]
    assert [estimate_tokens(text) for text in ("", "a", "abcd", "äää")] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", ": record 1: got 1; must be a JSON object"),
        (
            '[{"q": 1}]',
            ": record 1: got the keys ['q']; must be a record of ShareGPT (conversations) "
            "or Alpaca (instruction, input, output)",
        ),
        (
            '[{"conversations": "no"}]',
            ": record 1: conversations: got 'no'; must be a list of turns",
        ),
        (
            '[{"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": ""}]}]',
            ": record 1: value: got 3; must be text",
        ),
        ('{"instruction": "a", "output": "b"}\n{"instruction": "a"}', ":2: output: got None; must"),
        ('{"instruction": "a", "input": 5, "output": "b"}', ":1: input: got 5; must be text"),
        ('{"instruction": "a", "output": "b"}\n{"instr', ":2: not JSON (Unterminated string"),
        ('[{"instruction": "a",\n"output" "b"}]', ":2: not JSON (Expecting ':' delimiter)"),
        ("[" + "7" * 5000 + "]", ":1: not JSON (Exceeds the limit"),
        ("[" * 200_000, ":1: not JSON (nested too deeply)"),
        (
            json.dumps({"instruction": ["x" * 99], "output": ""}),
            f":1: instruction: got ['{'x' * 55}...; must be text",
        ),
    ],
)
def test_malformed_json_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = _write(tmp_path, text)
    assert refusal_of(path).startswith(path + message)


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_empty_files_are_refused(tmp_path: Path, text: str) -> None:
    path = _write(tmp_path, text)
    assert refusal_of(path) == f"{path}: got an empty file; must hold at least one job"


def test_nothing_within_the_limits_is_refused(tmp_path: Path) -> None:
    assert refusal_of("equal:100:100", LengthLimits(max_prompt_tokens=50)) == (
        "dataset: got 'equal:100:100', which has 1 jobs and none of them within the limits "
        "(max_prompt_tokens 50, max_total_tokens None, max_output_tokens None)"
    )
    with pytest.raises(WorkloadError, match="which has 0 jobs"):
        load_lengths(_write(tmp_path, "prompt_tokens,output_tokens\n"))


def test_no_such_data_set() -> None:
    assert refusal_of("sharegtp") == (
        "dataset: got 'sharegtp' (No such file or directory); "
        "must be sharegpt, alpaca, chat, code, long-context, agents, batch-beside-chat, "
        "equal:PROMPT:OUTPUT or the path of a file"
    )


def test_bytes_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match=r"got bytes that are not UTF-8; must be a text file$"):
        load_lengths(str(path))


def test_data_sets_without_timestamps_need_a_rate() -> None:
    assert len(Workload("sharegpt", 7, seed=3).trace(1.0)) == 7
    with pytest.raises(WorkloadError, match=r"^rate: got none; alpaca has no timestamps"):
        Workload("alpaca", 1).trace(None)


def test_workloads_load_neither_torch_nor_the_server_nor_grpc() -> None:
    script = (
        "import sys, fastserve_bench.workload, fastserve_bench.report.summary\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert "numpy" in loaded
    assert not set(loaded) & {"torch", "fastserve_backend", "grpc", "rich", "matplotlib"}


def test_a_scale_comes_before_the_limits(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n100,10\n300,50\n3,2\n")
    limits = LengthLimits(max_prompt_tokens=60, max_output_tokens=9)
    assert load_lengths(str(path), limits, scale=0.2) == [(20, 2), (1, 1)]
    with pytest.raises(WorkloadError, match=r"^scale: got 0; must be a finite number above 0$"):
        load_lengths(str(path), scale=0)


def test_traces_of_texts_have_their_prompts(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    records = [{"instruction": text, "output": "x" * len(text)} for text in ("a" * 40, "b" * 80)]
    path.write_text(json.dumps(records))
    for job in Workload(str(path), 20, scale=0.5).trace(1.0):
        assert job.prompt is not None
        assert job.prompt_tokens == len(job.prompt) / 8
    assert Workload("equal:1:1", 1).trace(1.0)[0].prompt is None


def test_a_workload_has_its_ratio_or_its_own_timestamps() -> None:
    workload = Workload("equal:30:10", 5, scale=2.0, length_ratio=1.0)
    assert {(job.prompt_tokens, job.output_tokens) for job in workload.trace(1.0)} == {(40, 40)}
    with pytest.raises(WorkloadError, match="--length-ratio needs a rate"):
        workload.trace(None)
