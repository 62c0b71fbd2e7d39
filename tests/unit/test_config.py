"""engine.yaml: all errors are reported at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"scheduler": {"max_num_seqs": "many"}},
            "scheduler.max_num_seqs: got 'many'; must be a whole number or 'auto'",
        ),
        (
            {"kv_cache": {"session_ttl_s": "later"}},
            "kv_cache.session_ttl_s: got 'later'; must be 'auto' or a number",
        ),
        (
            {"scheduler": {"stream_interval": 0}},
            "scheduler.stream_interval: got 0; must be at least 1",
        ),
        (
            {"kv_cache": {"prefix_caching": 7}},
            "kv_cache.prefix_caching: got 7; must be true or false",
        ),
        ({"kv_cache": {"block_size": 17}}, "kv_cache.block_size: got 17; must be 8, 16, 32 or 64"),
        (
            {"kv_cache": {"device_blocks": 1.5}},
            "kv_cache.device_blocks: got 1.5; must be a whole number",
        ),
        ({"model": {"model": 5}}, "model.model: got 5; must be text"),
        ({"scheduler": "fcfs"}, "scheduler: got 'fcfs'; must be a mapping of keys"),
        ({"sheduler": {}}, "sheduler: unknown key; did you mean scheduler?"),
        ({"max_num_seqs": 4}, "max_num_seqs: unknown key; it belongs in the section scheduler"),
        (
            {"scheduler": {"fair_shares": True}},
            "scheduler.fair_shares: unknown key; it belongs in the section tenants",
        ),
        (
            {"scheduler": {"max_num_seq": 4}},
            "scheduler.max_num_seq: unknown key; did you mean max_num_seqs?",
        ),
        (
            {"extra": 1},
            "extra: unknown key; known are model, parallel, kv_cache, scheduler, tenants",
        ),
    ],
)
def test_a_problem_is_one_line_with_its_remedy(
    tmp_path: Path, values: dict[str, object], problem: str
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_yaml(path)
    assert str(caught.value) == f"{path}: invalid configuration:\n  {problem}"


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = EngineConfig().with_keys(model="m", policy="fcfs", device_blocks=7, dtype="float32")
    path = tmp_path / "engine.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert EngineConfig.from_yaml(path) == config


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("")
    assert EngineConfig.from_yaml(path) == EngineConfig()


def test_every_problem_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict(
            {
                "model": {"dtype": "int4", "colour": "red"},
                "kv_cache": {"block_size": 17, "device_memory_utilization": 1.5},
                "scheduler": {"policy": "lifo", "quantum_ratio": 1.0, "max_num_seqs": "many"},
                "extra": {},
            }
        )
    message = str(caught.value)
    for part in (
        "model.dtype: got 'int4'",
        "model.colour: unknown key",
        "kv_cache.block_size: got 17",
        "kv_cache.device_memory_utilization: got 1.5",
        "scheduler.policy: got 'lifo'",
        "scheduler.quantum_ratio: got 1.0",
        "scheduler.max_num_seqs: got 'many'",
        "extra: unknown key",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "must be at least"),
        ({"base_quantum_ms": 0}, "base_quantum_ms: got 0.0; must be 'auto' or from 0.001 to"),
        ({"base_quantum_ms": 5e-324}, "base_quantum_ms: got 5e-324"),
        ({"starvation_ms": 1e300}, r"starvation_ms: got 1e\+300"),
        ({"swap_space_gib": 1e300}, r"swap_space_gib: got 1e\+300"),
        ({"disk_swap_gib": -1}, "disk_swap_gib: got -1"),
        (
            {"disk_swap_gib": 8, "swap_space_gib": 0},
            r"kv_cache\.disk_swap_gib: got 8; KV reaches the disk through host memory",
        ),
        ({"disk_swap_gib": 8, "strategy": "recompute"}, r"kv_cache\.disk_swap_gib: got 8"),
        ({"max_num_seqs": True}, "max_num_seqs: got True; must be a number"),
        ({"starvation_ms": True}, "starvation_ms: got True; must be a number"),
        ({"device_blocks": False}, "device_blocks: got False; must be a number"),
        ({"tokenizer": ""}, "tokenizer: got ''"),
        ({"starvation_ms": float("nan")}, "starvation_ms: got nan"),
        ({"slo_ms": float("inf")}, "slo_ms: got inf"),
        ({"ttft_slo_ms": 0}, "ttft_slo_ms: got 0"),
        ({"ttft_slo_ms": float("nan")}, "ttft_slo_ms: got nan"),
        ({"tpot_slo_ms": 1e10}, "tpot_slo_ms: got 1"),
        ({"tpot_slo_ms": True}, "tpot_slo_ms: got True; must be a number"),
        ({"most_urgent_priority": 1}, "most_urgent_priority: got 1"),
        ({"least_urgent_priority": -1}, "least_urgent_priority: got -1"),
        ({"quantum_ratio": 1.0000001}, "quantum_ratio: got 1.0000001"),
        (
            {"policy": "speculative", "length_prediction": "off"},
            r"scheduler\.length_prediction: got 'off'; the policy speculative schedules by",
        ),
        ({"no_such_key": 1}, "no_such_key: unknown key; known keys are"),
    ],
)
def test_impossible_values(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig().with_keys(**keys)


@pytest.mark.parametrize(
    ("content", "policy", "predicts"),
    [
        ("on", "fcfs", True),  # YAML reads it as true
        ("off", "gittins", False),
        ("'on'", "gittins", True),
        ("auto", "gittins", False),
        ("auto", "speculative", True),
    ],
)
def test_when_lengths_are_predicted(
    tmp_path: Path, content: str, policy: str, predicts: bool
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(f"scheduler: {{policy: {policy}, length_prediction: {content}}}")
    config = EngineConfig.from_yaml(path)
    assert config.scheduler.predicts_lengths == predicts
    path.write_text(config.to_yaml())
    assert EngineConfig.from_yaml(path) == config


@pytest.mark.parametrize(
    "content",
    [
        *("- a list", "model: [", "? [a, b]", "\xff"),
        *("[" * 5000, "model: 2024-13-45", "a: " + "9" * 5000),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"engine\.yaml"):
        EngineConfig.from_yaml(path)
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        EngineConfig.from_yaml(tmp_path / "missing")


@pytest.mark.parametrize(
    "content", ["scheduler: {policy: fcfs, slo_ms: 3, policy: srpt}", "model: {}\nmodel: {}"]
)
def test_a_key_twice_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"(policy|model): is here twice; remove one(.|\n)*line"):
        EngineConfig.from_yaml(path)


def test_key_names_are_unique_over_the_sections() -> None:
    names = [key for section in EngineConfig().model_dump().values() for key in section]
    assert len(names) == len(set(names))


TWO_HOSTS = {"nnodes": 2, "master_addr": "host0", "master_port": 29500}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor_parallel_size": 3}, r"parallel\.nnodes: got 2; must divide .* the 3 ranks"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            r"parallel\.nnodes: got 2; with 3 ranks each, some stages of 2 ranks would be on two",
        ),
        (
            {"tensor_parallel_size": 2, "master_port": 0},
            r"parallel\.master_port: got 0; with several hosts choose one",
        ),
        (
            {"tensor_parallel_size": 4, "node_rank": 1},
            r"parallel\.node_rank: got 1; the engine runs on host 0 only. On this one run: "
            r"torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr host0 "
            r"--master-port 29500 -m fastserve_backend\.worker --engine tcp://host0:29501$",
        ),
        (
            {"tensor_parallel_size": 4, "node_rank": 2},
            r"parallel\.node_rank: got 2; with 2 hosts it is 0 to 1",
        ),
    ],
)
def test_what_several_hosts_cannot_do(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig().with_keys(**(TWO_HOSTS | keys))


def test_a_stage_may_be_on_several_hosts_if_one_is_too_small() -> None:
    assert EngineConfig().with_keys(**TWO_HOSTS, tensor_parallel_size=4).parallel.num_ranks == 4
