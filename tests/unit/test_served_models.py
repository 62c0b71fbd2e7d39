"""Several models in one server: their names, their configurations, their shares of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.served_models import divide_machine, name_models
from refused_command import refused_command


def config(model: str = "opt-125m", **keys: object) -> EngineConfig:
    return EngineConfig().with_keys(model=model, load_format="dummy", device="cuda", **keys)


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["Qwen/Qwen2.5-0.5B"], ["fastserve"]),
        (
            ["Qwen/Qwen2.5-0.5B-Instruct@main", "/models/My Model.Q4_K.gguf", "./opt-125m/"],
            ["qwen2.5-0.5b-instruct", "my-model.q4_k", "opt-125m"],
        ),
    ],
)
def test_models_have_short_names(models: list[str], names: list[str]) -> None:
    assert list(name_models([config(model) for model in models], [])) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a b --name one", "name: got 1 for 2 models; give one for each, in their order"),
        ("me/a you/A", "name: 'a' would be two models; give each another --name"),
        ("a b --name x --name x", "name: 'x' would be two models"),
        ("a --name ../x", "name: got '../x'; must be 1 to 64 letters, digits"),
        ("a b --config {file} --config {file} --config {file}", "config: got 3 files for 2 models"),
        (
            "a b --host-share 0.6",
            "host_share: got 0.6 of a, 0.6 of b; together they must not exceed 1; lower them",
        ),
        ("a b --model-control --host 0.0.0.0", "model-control: got it with the host 0.0.0.0"),
        ("a --model-repository {file}", "engine.yaml, which is no directory"),
        ("a --model-repository {folder}", "has a model fastserve, too; give the other a --name"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "engine.yaml").touch()
    (tmp_path / "fastserve").mkdir()
    words = arguments.format(file=tmp_path / "engine.yaml", folder=tmp_path).split()
    error = refused_command(monkeypatch, capfd, "serve", *words)
    assert error.startswith("error: ")
    assert message in error


def test_defaults_are_divided_evenly() -> None:
    shared = divide_machine({"a": config(), "b": config(swap_space_gib=1.0)})
    for model in shared.values():
        assert model.parallel.host_share == 0.5
        assert model.kv_cache.device_memory_utilization == 0.45
    assert [model.kv_cache.swap_space_gib for model in shared.values()] == [2.0, 1.0]


def test_what_a_configuration_sets_stands() -> None:
    large = config(host_share=0.8, device_memory_utilization=0.6)
    shared = divide_machine({"large": large, "b": config(), "c": config()})
    assert shared["large"].parallel.host_share == 0.8
    assert [shared[name].parallel.host_share for name in "bc"] == pytest.approx([0.1, 0.1])
    utilizations = [shared[name].kv_cache.device_memory_utilization for name in "bc"]
    assert utilizations == pytest.approx([0.15, 0.15])


def test_a_default_that_is_given_stands(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("kv_cache: {device_memory_utilization: 0.9}", encoding="utf-8")
    given = EngineConfig.from_yaml(file).with_keys(model="a", device="cuda")
    with pytest.raises(ConfigError, match=r"got 0\.9 of a; which leaves nothing for b; lower"):
        divide_machine({"a": given, "b": config()})


def test_models_on_cpus_leave_the_gpu_alone() -> None:
    shared = divide_machine({"a": config(), "b": config().with_keys(device="cpu")})
    assert shared["a"].kv_cache.device_memory_utilization == 0.9


def test_one_model_has_the_machine() -> None:
    assert divide_machine({"a": config()}) == {"a": config()}


def test_a_server_refuses_shares_before_it_starts() -> None:
    with pytest.raises(ConfigError, match=r"host_share: got 1 of a, 0\.5 of b"):
        TritonServer({"a": config(host_share=1.0), "b": config(host_share=0.5)})
