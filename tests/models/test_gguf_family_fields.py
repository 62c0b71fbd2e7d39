"""Fields and tensors of GGUF files in which families differ are either used or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.tokenizer import load_tokenizer
from gguf_families import VARIANTS
from gguf_files import Arrays, Fields, add, remove, write_gguf

pytestmark = pytest.mark.usefixtures("conversions_anywhere")

Change = Callable[[Fields, Arrays], None]


def configuration(tmp_path: Path, variant: str, change: Change) -> dict[str, Any]:
    """The config.json of the variant's file after a change."""
    chosen = VARIANTS[variant]
    file = chosen.write(tmp_path / "m.gguf", chosen.model(), change)
    convert(file, tmp_path / "out")
    config: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    return config


def with_field(key: str, value: Any) -> Change:
    return lambda fields, arrays: fields.update({key: value})


def sliding(config: dict[str, Any]) -> list[int]:
    kinds = config["layer_types"]
    assert set(kinds) <= {"sliding_attention", "full_attention"}
    return [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]


def test_layers_with_a_window(tmp_path: Path) -> None:
    assert sliding(configuration(tmp_path, "gemma2", lambda fields, arrays: None)) == [0, 2]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [([False, True, True, False], [1, 2]), (3, [0, 1, 3]), (1, []), (0, [0, 1, 2, 3])],
)
def test_layers_with_a_window_where_the_file_names_them(
    tmp_path: Path, pattern: Any, expected: list[int]
) -> None:
    change = with_field("gemma2.attention.sliding_window_pattern", pattern)
    assert sliding(configuration(tmp_path, "gemma2", change)) == expected


def test_no_window_without_its_field(tmp_path: Path) -> None:
    config = configuration(tmp_path, "gemma3", remove("gemma3.attention.sliding_window"))
    assert sliding(config) == []


def test_a_window_of_all_positions_is_none(tmp_path: Path) -> None:
    config = configuration(tmp_path, "phi3", with_field("phi3.attention.sliding_window", 48))
    assert config["sliding_window"] is None


@pytest.mark.parametrize(
    ("variant", "change", "expected"),
    [
        ("gemma2", remove("blk.3.post_ffw_norm.weight"), r"lacks tensor 'blk\.3\.post_ffw_norm"),
        ("qwen2", remove("blk.0.attn_q.bias"), r"lacks tensor 'blk\.0\.attn_q\.bias'"),
        ("qwen3", remove("blk.2.attn_k_norm.weight"), r"lacks tensor 'blk\.2\.attn_k_norm"),
        ("phi3", remove("blk.2.attn_qkv.weight"), r"lacks tensor 'blk\.2\.attn_qkv"),
        ("starcoder2", remove("output_norm.bias"), r"lacks tensor 'output_norm\.bias'"),
        ("olmo2", add(blk__0__attn_norm__weight=[64]), r"belongs to no Olmo2ForCausalLM"),
        (
            "phi3_long",
            remove("rope_factors_short.weight"),
            r"lacks tensor 'rope_factors_short\.weight', which its rotary scaling asks for",
        ),
        (
            "phi3",
            with_field("phi3.rope.scaling.type", "longrope"),
            r"lacks tensor 'rope_factors_long\.weight', which its rotary scaling asks for",
        ),
    ],
)
def test_tensors_that_are_missing_or_unknown_are_named(
    tmp_path: Path, variant: str, change: Change, expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        configuration(tmp_path, variant, change)


def of_another_size(name: str) -> Change:
    """Changes the size of each expert's rows."""

    def change(fields: Fields, arrays: Arrays) -> None:
        arrays[name] = np.ascontiguousarray(arrays[name][..., 1:])

    return change


@pytest.mark.parametrize(
    ("variant", "change", "expected"),
    [
        ("gpt_oss", remove("blk.2.attn_sinks.weight"), r"lacks tensor 'blk\.2\.attn_sinks"),
        (
            "olmoe",
            remove("blk.0.ffn_gate_exps.weight"),
            r"lacks tensor 'blk\.0\.ffn_gate_exps",
        ),
        (
            "qwen3moe",
            of_another_size("blk.1.ffn_up_exps.weight"),
            r"has shape \(4, 32, 63\), but its metadata asks for \(4, 32, 64\)",
        ),
        (
            "qwen3moe",
            with_field("qwen3moe.expert_gating_func", 2),
            r"qwen3moe\.expert_gating_func is 2, but only 1 is supported",
        ),
        (
            "mixtral",
            add(blk__0__ffn_gate__0__weight=[96, 64]),
            r"'blk\.0\.ffn_gate\.0\.weight' belongs to no MixtralForCausalLM",
        ),
    ],
)
def test_experts_that_cannot_be_served_are_named(
    tmp_path: Path, variant: str, change: Change, expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        configuration(tmp_path, variant, change)


@pytest.mark.parametrize(
    ("variant", "key", "value", "supported"),
    [
        ("granite", "granite.rope.scaling.finetuned", False, "True"),
        ("mistral3", "mistral3.rope.scaling.yarn_log_multiplier", 0.1, "0.0"),
        ("qwen2", "qwen2.attention.sliding_window", 16, "0"),
        ("qwen3", "qwen3.final_logit_softcapping", 30.0, "0.0"),
        ("gemma2", "gemma2.rope.freq_base_swa", 500.0, "10000.0"),
        ("smollm3", "smollm3.residual_scale", 0.5, "1.0"),
    ],
)
def test_values_that_a_family_does_not_have(
    tmp_path: Path, variant: str, key: str, value: Any, supported: str
) -> None:
    with pytest.raises(ModelError, match=f"{key} is .*, but only {supported} is supported; use"):
        configuration(tmp_path, variant, with_field(key, value))


def test_experts_of_a_family_without_any(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"qwen2\.expert_count is 4, but only 0 is supported"):
        configuration(tmp_path, "qwen2", with_field("qwen2.expert_count", 4))


@pytest.mark.parametrize("variant", ["qwen2", "phi3", "granite", "gemma3"])
def test_scaling_that_is_not_known(tmp_path: Path, variant: str) -> None:
    key = f"{VARIANTS[variant].architecture}.rope.scaling.type"
    with pytest.raises(ModelError, match=r"rotary scaling is 'spiral'; supported are linear, yarn"):
        configuration(tmp_path, variant, with_field(key, "spiral"))


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", {}, {}, architecture="mamba")
    known = {variant.architecture for variant in VARIANTS.values()}
    with pytest.raises(ModelError, match=r"^its architecture is 'mamba'; GGUF files") as error:
        convert(file, tmp_path / "out")
    listed = str(error.value).partition("supported for ")[2].partition(";")[0].split(", ")
    assert listed == sorted(known)


def test_the_page_lists_the_architectures() -> None:
    page = Path(__file__).parents[2] / "docs" / "serve.md"
    table = page.read_text().partition("### GGUF files")[2].partition("- A file of another")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall("`(.*?)`", row)}
    assert listed == {variant.architecture for variant in VARIANTS.values()}


@pytest.mark.parametrize("architecture", ["phi3", "qwen2"])
def test_spaces_after_the_special_tokens_of_phi3(tmp_path: Path, architecture: str) -> None:
    """They belong to the tokens, except after the begin token."""
    words = ["▁", "h", "i", "hi", "▁hi"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokens += ["<|user|>"] + [f"[PAD{n}]" for n in range(301 - len(tokens) - 1)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 5, 3, *[5] * (301 - 265)]

    def change(fields: Fields, arrays: Arrays) -> None:
        del fields["tokenizer.ggml.merges"]
        fields |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(301 - 259)],
            "tokenizer.ggml.eot_token_id": 2,
        }

    configuration(tmp_path, architecture, change)
    config = load_model_config(str(tmp_path / "out"), load_format="auto")
    ids = load_tokenizer("m", None, config).encode("<|user|>\nhi<s> hi", special_tokens=False)
    newline = [] if architecture == "phi3" else ["▁", "<0x0A>"]
    last = ["▁hi"] if architecture == "phi3" else ["hi"]
    assert [tokens[one] for one in ids] == ["<|user|>", *newline, *last, "<s>", "▁", "▁hi"]
