"""The latency profile: its predictions, its identity and its file."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.config_sections import ParallelSection
from fastserve_backend.errors import ConfigError
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.latency import Curve, Identity, LatencyProfile
from hypothesis import given
from hypothesis import strategies as st
from profiles import identity, known_profile


def test_an_iteration_costs_the_sum_of_its_parts() -> None:
    profile = known_profile()
    assert profile.decode_s(500) == pytest.approx(0.004 + 1e-5 + 1e-3 + 500e-6)
    tokens = 16 * 1e-5 + 48 * 1e-4 + 36 * 2e-4
    assert profile.prefill_s(100) == pytest.approx(0.004 + tokens + 1e-3 + 5050e-8)
    mix = IterationLoad.of([(499, 1, True), (0, 10, True), (30, 10, False)])
    assert profile.iteration_s(mix) == pytest.approx(
        0.004 + (16 * 1e-5 + 5 * 1e-4) + (1e-3 + 1e-4) + 500e-6 + (55 + 355) * 1e-8
    )


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.lists(st.floats(0, 1e-2), min_size=7, max_size=7),
    st.integers(0, 1000),
)
def test_a_curve_is_the_integral_of_its_slopes(
    widths: list[int], slopes: list[float], x: int
) -> None:
    knots = [0]
    for width in widths:
        knots.append(knots[-1] + width)
    curve = Curve(tuple(knots), tuple(slopes[: len(knots)]))
    by_hand = sum(slopes[max(i for i, knot in enumerate(knots) if knot <= n)] for n in range(x))
    assert curve(x) == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("knots", "slopes"),
    [((), ()), ((1,), (1.0,)), ((0, 4, 4), (1.0, 1.0, 1.0)), ((0, 4), (1.0,)), ((0,), (-1e-9,))],
)
def test_a_curve_that_could_fall_is_refused(
    knots: tuple[int, ...], slopes: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=r"knots|slopes|coefficient"):
        Curve(knots, slopes)


@pytest.mark.parametrize(
    ("field", "key"),
    [("quantization", "model.quantization"), ("kv_dtype", "kv_cache.device_dtype")],
)
def test_what_is_rounded_has_profiles_of_its_own(field: str, key: str) -> None:
    exact = load_model_config("opt-125m", load_format="dummy")
    rounded = replace(exact, **{field: "int8"})
    keys = set()
    for model in (exact, rounded):
        of_model = Identity.of(
            model, hardware="cpu", dtype="bfloat16", block_size=16, parallel=ParallelSection()
        )
        keys.add(of_model.key)
        profile = replace(known_profile(), identity=of_model)
        profile.require(model, ParallelSection(), 16)
        other = rounded if model is exact else exact
        with pytest.raises(ConfigError, match=f"; set {re.escape(key)} to that"):
            profile.require(other, ParallelSection(), 16)
    assert len(keys) == 2


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "profile.json"
    profile = replace(known_profile(), held_out_error=0.05, num_samples=40)
    profile.save(path)
    assert LatencyProfile.load(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    known_profile().save(path)
    document = json.loads(path.read_text())
    values = document["identity"]
    assert values["model"] == "tiny"
    assert values["hardware"] == "a slide rule"
    assert values["dtype"] == "float32"
    assert (values["tensor_parallel_size"], values["pipeline_parallel_size"]) == (1, 1)
    assert document["num_blocks"] == 4096


def saved(path: Path, **changes: Any) -> Path:
    known_profile().save(path)
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', "\x00", "3"])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^profile: .*profile\.json") as caught:
        LatencyProfile.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"base_s": "fast"},
        {"base_s": -1.0},
        {"base_s": float("nan")},
        {"tokens": {"knots": [0], "slopes_s": []}},
        {"tokens": [1, 2]},
        {"decode_context_s": None},
        {"identity": None},
        {"identity": {"model": "tiny"}},
        {"identity": asdict(identity(dtype="float64"))},
        {"num_blocks": "many"},
    ],
    ids=str,
)
def test_damaged_values_are_one_clear_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = saved(tmp_path / "profile.json", **changes)
    with pytest.raises(ConfigError, match="damaged"):
        LatencyProfile.load(path)


def test_files_that_cannot_be_read_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile: cannot read .*missing\.json: No such file"):
        LatencyProfile.load(tmp_path / "missing.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="profile: "):
        LatencyProfile.load(binary)


def measured_on(config: ModelConfig, parallel: ParallelSection, path: Path) -> LatencyProfile:
    """A profile of this model, saved and loaded."""
    identity = Identity.of(
        config, hardware="cpu", dtype="bfloat16", block_size=16, parallel=parallel
    )
    replace(known_profile(), identity=identity).save(path)
    return LatencyProfile.load(path)


def test_a_profile_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    small = load_model_config("opt-125m", load_format="dummy")
    large = load_model_config("opt-1.3b", load_format="dummy")
    profile = measured_on(small, ParallelSection(), tmp_path / "profile.json")
    profile.require(small, ParallelSection(), 16)
    profile.require(replace(small, name="a copy of it", max_model_len=512), ParallelSection(), 16)
    with pytest.raises(ConfigError, match=r"profile: .*'opt-125m' for 'opt-1\.3b'") as caught:
        profile.require(large, ParallelSection(), 16)
    assert "\n" not in str(caught.value)


def test_a_profile_of_other_ranks_is_refused_by_their_number(tmp_path: Path) -> None:
    small = load_model_config("opt-125m", load_format="dummy")
    parallel = ParallelSection(tensor_parallel_size=2, pipeline_parallel_size=3)
    profile = measured_on(small, parallel, tmp_path / "profile.json")
    assert profile.num_stages == 3
    profile.require(small, parallel, 16)
    with pytest.raises(ConfigError, match=r"profile: .* tensor_parallel_size 2, not 1; set"):
        profile.require(small, ParallelSection(), 16)
    with pytest.raises(ConfigError, match=r"profile: .* pipeline_parallel_size 3, not 1; set"):
        profile.require(small, ParallelSection(tensor_parallel_size=2), 16)


def test_the_cache_key_is_of_all_that_times_depend_on_and_of_nothing_else() -> None:
    key = identity().key
    assert identity(model="another name").key == key
    for changes in (
        {"shape": {"num_layers": 3, "hidden_size": 64}},
        {"hardware": "an abacus"},
        {"dtype": "bfloat16"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"block_size": 32},
        {"max_model_len": 512},
    ):
        assert identity(**changes).key != key, changes
