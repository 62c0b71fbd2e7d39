"""Classes of jobs: how they are written, and which job has which."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fastserve_bench.workload import NO_CLASS, ServiceClass, Workload
from fastserve_client.errors import WorkloadError

CHAT = ServiceClass.parse("chat:0.3,ttft_slo_ms=1000,tpot_slo_ms=290")
BATCH = ServiceClass.parse("batch:0.7, priority=1, tenant=b, key_variable=B_KEY")


def without_shares(*classes: ServiceClass) -> tuple[ServiceClass, ...]:
    return tuple(replace(one, share=None) for one in classes)


def test_a_class_as_it_is_written() -> None:
    assert ServiceClass("chat", 0.3, ttft_slo_s=1.0, tpot_slo_s=0.29) == CHAT
    assert ServiceClass("batch", 0.7, priority=1, tenant="b", key_variable="B_KEY") == BATCH
    assert ServiceClass.parse("plain") == ServiceClass("plain")


def test_a_request_has_only_the_fields_that_its_class_sets() -> None:
    assert CHAT.fields == {"ttft_slo_ms": 1000.0, "tpot_slo_ms": 290.0}
    assert BATCH.fields == {"priority": 1, "tenant": "b"}
    assert NO_CLASS.fields == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "class: got the class ''; a name has 1 to 64"),
        ("[/x]:1", "class: got the class '[/x]'; a name"),
        ("a" * 65, "class: got the class 'aaa"),
        ("a:", "class: a: the share: got ''; must be a number above 0"),
        ("a:0", "class: a: the share: got '0'; must be"),
        ("a:nan", "class: a: the share: got 'nan'; must be"),
        ("a,priority=high", "class: a: priority: got 'high'; must be a whole number"),
        ("a,ttft_slo_ms=0", "class: a: ttft_slo_ms: got '0'; must be a number above 0"),
        ("a,tpot_slo_ms=inf", "class: a: tpot_slo_ms: got 'inf'; must be a number above 0"),
        ("a,tenant=", "class: a: got 'tenant='; settings are priority=N, "),
        ("a,ttft=5", "class: a: got 'ttft=5'; settings are priority=N, ttft_slo_ms=N"),
    ],
)
def test_a_class_that_is_written_wrong(text: str, message: str) -> None:
    with pytest.raises(WorkloadError) as refused:
        ServiceClass.parse(text)
    assert str(refused.value).startswith(message)


def test_shares_decide_how_many_jobs_have_a_class_and_nothing_else() -> None:
    plain = Workload("alpaca", 2000, seed=3)
    trace = replace(plain, classes=(CHAT, BATCH)).trace(1.0)
    assert [replace(job, service=NO_CLASS) for job in trace] == plain.trace(1.0)
    assert 0.27 < sum(job.service is CHAT for job in trace) / len(trace) < 0.33
    # The same jobs have the same classes at another rate, and in a longer trace.
    services = [job.service for job in trace]
    longer = Workload("alpaca", 2500, seed=3, classes=(CHAT, BATCH)).trace(8.0)
    assert [job.service for job in longer[:2000]] == services
    other = Workload("alpaca", 2000, seed=4, classes=(CHAT, BATCH)).trace(1.0)
    assert [job.service for job in other] != services


def test_a_mix_of_two_kinds_names_them() -> None:
    mix = Workload("batch-beside-chat", 40)
    names = [job.service.name for job in mix.trace(1.0)]
    assert (names.count("batch"), names.count("chat")) == (10, 30)
    classes = without_shares(CHAT, BATCH)
    assert {job.service for job in replace(mix, classes=classes).trace(1.0)} == set(classes)


FILES = {
    "lengths.csv": "prompt_tokens,output_tokens,class\n1,2,chat\n3,4,batch\n5,6,\n",
    "azure.csv": "class,TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "chat,2023-11-16 18:17:03,1,2\nchat,2023-11-16 18:17:03,1,0\n"
    "batch,2023-11-16 18:17:04,3,4\n,2023-11-16 18:17:05,5,6\n",
    "burst.csv": "Timestamp,Request tokens,Response tokens,class\n"
    "1,1,2,chat\n2,3,4,batch\n3,5,6,\n",
    "mooncake.jsonl": "\n".join(
        json.dumps({"timestamp": n, "input_length": 2 * n + 1, "output_length": 2 * n + 2} | more)
        for n, more in enumerate(({"class": "chat"}, {"class": "batch"}, {}))
    ),
    "alpaca.json": json.dumps(
        [
            {"instruction": "a" * 4, "output": "a" * 8, "class": "chat"},
            {"instruction": "a" * 12, "output": "a" * 16, "class": "batch"},
            {"instruction": "a" * 20, "output": "a" * 24},
        ]
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_rows_of_a_file_name_their_class(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(FILES[name], encoding="utf-8")
    # Files without timestamps are drawn from, so that each row comes several times.
    workload = Workload(
        str(file), 3 if name in ("azure.csv", "burst.csv", "mooncake.jsonl") else 30
    )
    by_length = {1: "chat", 3: "batch", 5: ""}
    trace = workload.trace(1.0)
    assert {job.prompt_tokens: job.service.name for job in trace} == by_length
    assert all(job.service.name == by_length[job.prompt_tokens] for job in trace)
    classes = without_shares(CHAT, BATCH)
    expected = dict(zip((1, 3, 5), (*classes, NO_CLASS), strict=True))
    trace = replace(workload, classes=classes).trace(1.0)
    assert all(job.service == expected[job.prompt_tokens] for job in trace)


@pytest.mark.parametrize(
    ("dataset", "classes", "message"),
    [
        ("alpaca", (CHAT, CHAT), "class: got chat, chat; each must have another name"),
        ("alpaca", (CHAT, ServiceClass("b")), "class: got none of the shares or not all"),
        ("batch-beside-chat", (CHAT, BATCH), "class: got a share; batch-beside-chat says"),
        ("batch-beside-chat", (ServiceClass("chat"),), "has jobs of the class 'batch'; say what"),
    ],
)
def test_classes_that_do_not_go_with_the_data_set(
    dataset: str, classes: tuple[ServiceClass, ...], message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        Workload(dataset, 20, classes=classes).trace(1.0)


def test_a_name_in_a_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt_tokens,output_tokens,class\n1,2,[b]x\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"lengths.csv:2: got the class '\[b\]x'; a name"):
        Workload(str(file), 1).trace(1.0)
