"""GGUF files as llama.cpp writes them are mapped and compared with their original models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fastserve_backend.checkpoints.decoder_config import DecoderConfig as OurConfig
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.load_config import load_model_config
from gguf import GGMLQuantizationType as Kind
from gguf_files import (
    BEGIN,
    END,
    END_OF_TURN,
    Arrays,
    Fields,
    add,
    assert_equal,
    bfloat16,
    config_of,
    llama3_factors,
    metadata,
    permute,
    random_llama,
    remove,
    tensors,
    tensors_of,
    write_gguf,
    write_llama,
)
from paged_executor import PagedExecutor, check, load, prompts
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("conversions_anywhere")

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi_head": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 24},
    "theta": {"rope_parameters": {"rope_theta": 500.0}},
}


def check_logits(theirs: LlamaForCausalLM, directory: Path) -> None:
    executor = PagedExecutor(load(directory), theirs.config, prompts(30, 7), seed=1)
    executor.step([(0, 30), (1, 7)])
    check(theirs, executor)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LlamaForCausalLM, Path]:
    """A model in transformers, and the directory with its converted GGUF file."""
    directory = tmp_path_factory.mktemp(request.param)
    model = random_llama(**VARIANTS[request.param])

    def change(fields: Fields, arrays: Arrays) -> None:
        if request.param == "wide_heads":
            fields["llama.attention.key_length"] = model.config.head_dim

    convert(write_llama(directory / "m.gguf", model, change=change), directory / "out")
    return model, directory / "out"


def test_weights_are_the_models(pair: tuple[LlamaForCausalLM, Path]) -> None:
    model, directory = pair
    assert_equal(tensors_of(directory), bfloat16(model))


def test_logits_are_the_models(pair: tuple[LlamaForCausalLM, Path]) -> None:
    """This shows that rows of q and k are in the order of our rotation's pairs."""
    model, directory = pair
    check_logits(model, directory)


def test_configuration(pair: tuple[LlamaForCausalLM, Path]) -> None:
    model, directory = pair
    config, theirs = config_of(directory), model.config
    assert config.max_model_len == theirs.max_position_embeddings
    assert config.vocab_size == theirs.vocab_size
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert config.tie_word_embeddings is theirs.tie_word_embeddings
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    assert config.dtype == "bfloat16"
    assert json.loads((directory / "config.json").read_text())["bos_token_id"] == BEGIN
    assert config.eos_token_ids == (END, END_OF_TURN)
    check_rotation(model, config)


def test_the_end_of_a_turn_is_found_where_its_field_is_missing(tmp_path: Path) -> None:
    file = write_llama(
        tmp_path / "m.gguf", random_llama(), change=remove("tokenizer.ggml.eot_token_id")
    )
    convert(file, tmp_path / "out")
    assert config_of(tmp_path / "out").eos_token_ids == (END, END_OF_TURN)


def test_messages_of_gpt_oss_do_not_end_an_answer(tmp_path: Path) -> None:
    """Whatever token the file says ends a turn."""

    def change(fields: Fields, arrays: Arrays) -> None:
        tokens = fields["tokenizer.ggml.tokens"]
        tokens[-3:] = ["<|end|>", "<|return|>", "<|call|>"]
        fields["tokenizer.ggml.token_type"][-3:] = [3, 3, 3]
        # The last merges make the last tokens.
        del fields["tokenizer.ggml.merges"][-3:]
        fields["tokenizer.ggml.eos_token_id"] = 299
        fields["tokenizer.ggml.eot_token_id"] = 298

    convert(write_llama(tmp_path / "m.gguf", random_llama(), change=change), tmp_path / "out")
    assert config_of(tmp_path / "out").eos_token_ids == (299, 300)


def check_rotation(model: LlamaForCausalLM, config: OurConfig) -> None:
    rotation = model.model.rotary_emb
    ours = torch.tensor(config.rotaries[0].frequencies)
    torch.testing.assert_close(ours, rotation.inv_freq, rtol=1e-5, atol=0)
    assert config.rotaries[0].scale == pytest.approx(rotation.attention_scaling)


def test_wrong_order_of_rows_would_be_seen(tmp_path: Path) -> None:
    """Proves that the tests above can fail: rows of q and k stay as they are, or are permuted for
    other heads."""
    model = random_llama()

    def plain(fields: Fields, arrays: Arrays) -> None:
        arrays["blk.0.attn_q.weight"] = permute(arrays["blk.0.attn_q.weight"], 4)

    convert(write_llama(tmp_path / "m.gguf", model, change=plain), tmp_path / "out")
    got = tensors_of(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"]
    expected = bfloat16(model)["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(got, expected)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(model, tmp_path / "out")


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
)
def test_kinds_of_weights(tmp_path: Path, kind: Kind) -> None:
    """The weights are exactly the file's values, rounded once."""
    model = random_llama()
    convert(write_llama(tmp_path / "m.gguf", model, kind=kind), tmp_path / "out")
    stored = tensors(model)
    for name, array in stored.items():
        if array.ndim > 1:
            stored[name] = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    expected = write_gguf(tmp_path / "exact.gguf", metadata(model.config), stored)
    convert(expected, tmp_path / "exact")
    got = tensors_of(tmp_path / "out")
    assert_equal(got, tensors_of(tmp_path / "exact"))
    error = (got["lm_head.weight"].float() - model.lm_head.weight).abs().max()
    assert 0 < error < 0.1


class TestRotaryScaling:
    def convert(
        self, tmp_path: Path, rope: dict[str, Any], change: Callable[[Fields, Arrays], None]
    ) -> OurConfig:
        model = random_llama(
            rope_parameters={"rope_theta": 10000.0, **rope}, max_position_embeddings=131072
        )
        convert(write_llama(tmp_path / "m.gguf", model, change=change), tmp_path / "out")
        config = config_of(tmp_path / "out")
        check_rotation(model, config)
        check_logits(model, tmp_path / "out")
        return config

    @pytest.mark.parametrize("named", [True, False])
    def test_linear(self, tmp_path: Path, named: bool) -> None:
        def change(fields: Fields, arrays: Arrays) -> None:
            fields["llama.rope.scaling.factor"] = 4.0
            if named:
                fields["llama.rope.scaling.type"] = "linear"

        self.convert(tmp_path, {"rope_type": "linear", "factor": 4.0}, change)

    def test_linear_in_the_oldest_files(self, tmp_path: Path) -> None:
        self.convert(
            tmp_path,
            {"rope_type": "linear", "factor": 2.0},
            lambda fields, _: fields.update({"llama.rope.scale_linear": 2.0}),
        )

    @pytest.mark.parametrize("more", [{}, {"beta_fast": 16.0, "beta_slow": 2.0}])
    def test_yarn(self, tmp_path: Path, more: dict[str, float]) -> None:
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

        def change(fields: Fields, arrays: Arrays) -> None:
            scaling = "llama.rope.scaling"
            fields |= {
                f"{scaling}.type": "yarn",
                f"{scaling}.factor": 4.0,
                f"{scaling}.original_context_length": 1024,
                **{f"{scaling}.yarn_{key}": value for key, value in more.items()},
            }

        self.convert(tmp_path, rope | more, change)

    @pytest.mark.parametrize("factor", [8.0, 32.0])
    @pytest.mark.parametrize("theta", [10000.0, 500000.0])
    def test_llama_3(self, tmp_path: Path, factor: float, theta: float) -> None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

        def change(fields: Fields, arrays: Arrays) -> None:
            config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
            arrays["rope_freqs.weight"] = llama3_factors(config, factor)

        assert self.convert(tmp_path, rope, change).max_model_len == 131072

    @pytest.mark.parametrize(
        "factors", [[1, 1, 2, 2, 3, 3, 8, 8], [8.0] * 8, [1, 8]], ids=["other", "all", "too_few"]
    )
    def test_factors_of_another_model(self, tmp_path: Path, factors: list[float]) -> None:
        def change(fields: Fields, arrays: Arrays) -> None:
            arrays["rope_freqs.weight"] = np.array(factors, dtype=np.float32)

        file = write_llama(tmp_path / "m.gguf", random_llama(), change=change)
        with pytest.raises(
            ModelError, match=r"rope_freqs\.weight are not those of Llama 3\.1; use"
        ):
            convert(file, tmp_path / "out")

    def test_scaling_that_is_not_known(self, tmp_path: Path) -> None:
        change = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}
        file = write_llama(
            tmp_path / "m.gguf", random_llama(), change=lambda fields, _: fields.update(change)
        )
        with pytest.raises(ModelError, match="rotary scaling is 'longrope'; supported are linear"):
            convert(file, tmp_path / "out")


class TestRefused:
    """Each message is one line, which `converted_gguf` puts after the file's name."""

    def message(self, file: Path, tmp_path: Path) -> str:
        with pytest.raises(ModelError) as error:
            convert(file, tmp_path / "out")
        text = str(error.value)
        assert "\n" not in text
        return text

    @pytest.mark.parametrize(
        "content",
        [b"", b"GG", b"GGUF", b"no GGUF at all" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 99],
    )
    def test_no_gguf(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "m.gguf").write_bytes(content)
        assert "damaged" in self.message(tmp_path / "m.gguf", tmp_path)

    @pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.999])
    def test_truncated(self, tmp_path: Path, share: float) -> None:
        file = write_llama(tmp_path / "m.gguf", random_llama())
        os.truncate(file, int(file.stat().st_size * share))
        assert "damaged, incomplete, or no GGUF file" in self.message(file, tmp_path)

    def test_type_that_is_not_known(self, tmp_path: Path) -> None:
        file = write_llama(tmp_path / "m.gguf", random_llama())
        name = b"blk.0.ffn_up.weight"
        content = bytearray(file.read_bytes())
        # The number of dimensions and two sizes follow.
        content[content.index(name) + len(name) + 20] = 99
        file.write_bytes(content)
        message = self.message(file, tmp_path)
        assert "tensor 'blk.0.ffn_up.weight' is of type 99, which is not known here" in message

    def test_other_architecture(self, tmp_path: Path) -> None:
        model = random_llama()
        file = write_gguf(
            tmp_path / "m.gguf", metadata(model.config), tensors(model), architecture="falcon"
        )
        message = self.message(file, tmp_path)
        assert "architecture is 'falcon'; GGUF files are supported for " in message

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (remove("llama.block_count"), "llama.block_count is missing"),
            (remove("llama.attention.head_count"), "llama.attention.head_count is missing"),
            (
                remove("llama.attention.layer_norm_rms_epsilon"),
                "llama.attention.layer_norm_rms_epsilon is missing",
            ),
            (remove("llama.context_length"), "llama.context_length is missing"),
            (
                add(blk__0__ffn_gate_inp__weight=[2, 64]),
                "'blk.0.ffn_gate_inp.weight' belongs to no",
            ),
            (add(blk__2__attn_norm__weight=[64]), "'blk.2.attn_norm.weight' belongs to no"),
            (remove("tokenizer.ggml.model"), "ggml.model is None; known are gpt2 and llama"),
            (remove("tokenizer.ggml.merges"), "field tokenizer.ggml.merges is missing"),
            (remove("tokenizer.ggml.token_type"), "field tokenizer.ggml.token_type is missing"),
            (
                lambda fields, _: fields.update({"tokenizer.ggml.token_type": [1]}),
                "token_type has 1 values, but there are 301 tokens",
            ),
            (remove("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
            (
                lambda fields, _: fields.update({"split.count": 2}),
                "one part of a model in 2 files; give the first one, whose name ends in -00001-of",
            ),
            (
                lambda fields, _: fields.update({"llama.attention.head_count": 3}),
                "its metadata: num_key_value_heads is 2, expected a divisor of the 3 heads",
            ),
            (
                lambda _, arrays: arrays.update(
                    {"blk.0.attn_k.weight": np.zeros((7, 64), dtype=np.float32)}
                ),
                "'blk.0.attn_k.weight' has shape (7, 64), but its metadata asks for (32, 64)",
            ),
            (
                remove("llama.attention.head_count_kv"),
                "'blk.0.attn_k.weight' has shape (32, 64), but its metadata asks for (64, 64)",
            ),
            (remove("output_norm.weight"), "it lacks tensor 'output_norm.weight', which its meta"),
            (
                remove("blk.0.ffn_up.weight", "blk.1.ffn_up.weight"),
                "it lacks tensor 'blk.0.ffn_up.weight' and 1 more, which its metadata and",
            ),
            (
                add(
                    **{
                        f"blk__{layer}__attn_{kind}__bias": [size]
                        for layer in range(2)
                        for kind, size in {"q": 64, "k": 32, "v": 32}.items()
                    }
                ),
                "it lacks tensor 'blk.0.attn_output.bias' and 1 more",
            ),
            (add(blk__1__attn_q__bias=[64]), "'blk.1.attn_q.bias' belongs to no"),
            (
                lambda _, arrays: arrays.update(
                    {"output.weight": arrays["output.weight"].astype(np.float64)}
                ),
                "tensor 'output.weight' (F64) cannot be read",
            ),
            (
                lambda fields, _: fields.update({"llama.rope.scaling.type": "yarn"}),
                "llama.rope.scaling.factor is missing",
            ),
        ],
    )
    def test_fields_and_tensors(
        self, tmp_path: Path, change: Callable[[Fields, Arrays], None], expected: str
    ) -> None:
        file = write_llama(tmp_path / "m.gguf", random_llama(), change=change)
        assert expected in self.message(file, tmp_path)

    def test_tensors_before_any_is_converted(self, tmp_path: Path) -> None:
        file = write_llama(tmp_path / "m.gguf", random_llama(), change=remove("output_norm.weight"))
        self.message(file, tmp_path)
        assert not (tmp_path / "out").exists()

    def test_no_such_file(self) -> None:
        with pytest.raises(ModelError, match=r"'nowhere/m\.gguf': there is no such file"):
            load_model_config("nowhere/m.gguf", load_format="auto")
