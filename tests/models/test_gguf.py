"""GGUF files written as llama.cpp writes them, converted, against the models that they are of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fastserve_backend.models.config import load_model_config
from fastserve_backend.models.errors import ModelError
from fastserve_backend.models.gguf import converted
from fastserve_backend.models.gguf_conversion import convert
from fastserve_backend.models.llama_config import LlamaConfig as OurConfig
from fastserve_backend.models.tokenizer import load_tokenizer
from fastserve_backend.models.weights import checkpoint_tensors
from gguf import GGMLQuantizationType as Kind
from gguf_files import (
    BEGIN,
    END,
    END_OF_TURN,
    Arrays,
    Fields,
    byte_level_bpe,
    llama3_factors,
    metadata,
    permute,
    random_llama,
    tensors,
    write_gguf,
    write_llama,
)
from paged_executor import PagedExecutor, check, load, prompts
from tokenizers import Regex, Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi_head": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 24},
    "theta": {"rope_parameters": {"rope_theta": 500.0}},
}
HELLO = [{"role": "user", "content": "Hello"}]


def bfloat16(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The weights that a checkpoint of `model` in bfloat16 holds."""
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {stored.name: stored.read(()) for stored in checkpoint_tensors(directory)}


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same with weights of bfloat16's precision; it computes in float32."""
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return copy


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def check_logits(theirs: LlamaForCausalLM, directory: Path) -> None:
    executor = PagedExecutor(load(directory), theirs.config, prompts(30, 7), seed=1)
    executor.step([(0, 30), (1, 7)])
    check(theirs, executor)


def config_of(directory: Path) -> OurConfig:
    config = load_model_config(str(directory), load_format="auto")
    assert isinstance(config, OurConfig)
    return config


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LlamaForCausalLM, Path]:
    """A model in transformers, and the directory that its GGUF file became."""
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
    """So the rows of q and k are in the order in which our rotation pairs them."""
    model, directory = pair
    check_logits(rounded(model), directory)


def test_configuration(pair: tuple[LlamaForCausalLM, Path]) -> None:
    model, directory = pair
    config, theirs = config_of(directory), model.config
    assert config.max_model_len == theirs.max_position_embeddings
    assert config.vocab_size == theirs.vocab_size
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert config.tie_word_embeddings is theirs.tie_word_embeddings
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    assert config.dtype == "bfloat16"
    assert config.bos_token_id == BEGIN
    assert config.eos_token_ids == (END, END_OF_TURN)
    check_rotation(model, config)


def test_the_end_of_a_turn_is_found_where_its_field_is_missing(tmp_path: Path) -> None:
    file = write_llama(
        tmp_path / "m.gguf", random_llama(), change=remove("tokenizer.ggml.eot_token_id")
    )
    convert(file, tmp_path / "out")
    assert config_of(tmp_path / "out").eos_token_ids == (END, END_OF_TURN)


def check_rotation(model: LlamaForCausalLM, config: OurConfig) -> None:
    rotation = model.model.rotary_emb
    ours = torch.tensor(config.rotary.frequencies)
    torch.testing.assert_close(ours, rotation.inv_freq, rtol=1e-5, atol=0)
    assert config.rotary.scale == pytest.approx(rotation.attention_scaling)


def test_transformers_reads_the_directory(pair: tuple[LlamaForCausalLM, Path]) -> None:
    model, directory = pair
    theirs = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    assert_equal(
        {k: v for k, v in theirs.state_dict().items() if k in bfloat16(model)}, bfloat16(model)
    )


def test_wrong_order_of_rows_would_be_seen(tmp_path: Path) -> None:
    """The proof that the tests above would fail: q and k as they are, and as if of other heads."""
    model = random_llama()

    def plain(fields: Fields, arrays: Arrays) -> None:
        arrays["blk.0.attn_q.weight"] = permute(arrays["blk.0.attn_q.weight"], 4)

    convert(write_llama(tmp_path / "m.gguf", model, change=plain), tmp_path / "out")
    got = tensors_of(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"]
    expected = bfloat16(model)["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(got, expected)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(rounded(model), tmp_path / "out")


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_kinds_of_weights(tmp_path: Path, kind: Kind) -> None:
    """Exactly the values that the file stands for, rounded once."""
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


def test_several_files_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_backend.models.gguf_conversion._SHARD_BYTES", 20_000)
    model = random_llama()
    convert(write_llama(tmp_path / "m.gguf", model), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    assert_equal(tensors_of(tmp_path / "out"), bfloat16(model))


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
        check_logits(rounded(model), tmp_path / "out")
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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the plainest file becomes."""
    folder = tmp_path_factory.mktemp("plain")
    convert(write_llama(folder / "m.gguf", random_llama()), folder / "out")
    return folder / "out"


LLAMA3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


class TestTokenizer:
    TEXTS = ("Hello world", "  two\n\nlines", "naïve 日本 😀", "<|im_end|> in <|begin|> text", "")

    @pytest.mark.parametrize("text", TEXTS)
    def test_encodes_as_the_vocabulary_was_made(self, directory: Path, text: str) -> None:
        ours = load_tokenizer("m", None, config_of(directory))
        assert ours.encode(text) == byte_level_bpe().encode(text).ids

    def test_begin_token_where_the_file_asks_for_it(self, tmp_path: Path) -> None:
        model = random_llama()
        for asked in (True, False):
            directory = tmp_path / f"{asked}"
            file = write_llama(
                tmp_path / "m.gguf",
                model,
                change=lambda fields, _, asked=asked: fields.update(
                    {"tokenizer.ggml.add_bos_token": asked}
                ),
            )
            convert(file, directory)
            ids = load_tokenizer("m", None, config_of(directory)).encode("Hello")
            assert (ids[0] == BEGIN) is asked
            assert BEGIN not in ids[1:]

    def test_text_is_split_as_the_file_names_it(self, tmp_path: Path) -> None:
        # With a merge of digits, of which none is made across the boundaries of the split.
        texts = ("It's 1234567 o'CLOCK, I'LL go\n\n  now", " ½ 12", "a.b\nc")
        pieces = {
            "gpt-2": lambda text: byte_level_bpe().pre_tokenizer.pre_tokenize_str(text),
            "smollm": pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
            ).pre_tokenize_str,
            "llama-bpe": LLAMA3.pre_tokenize_str,
        }
        seen = set()
        for name, split in pieces.items():
            directory = tmp_path / name
            change = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
            file = write_llama(
                tmp_path / "m.gguf",
                random_llama(),
                change=lambda fields, _, change=change: fields.update(change),
            )
            convert(file, directory)
            fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
            for text in texts:
                assert fast.pre_tokenizer.pre_tokenize_str(text) == split(text)
            seen.add(str(fast.pre_tokenizer.pre_tokenize_str(texts[0])))
        assert len(seen) == 3

    def test_llama_3_begins_with_its_begin_token(self, tmp_path: Path) -> None:
        file = write_llama(
            tmp_path / "m.gguf",
            random_llama(),
            change=lambda fields, _: fields.update({"tokenizer.ggml.pre": "llama-bpe"}),
        )
        convert(file, tmp_path / "out")
        ours = load_tokenizer("m", None, config_of(tmp_path / "out"))
        assert ours.encode("Hello")[0] == BEGIN
        # The template writes it, and it is not added again.
        chat = ours.encode(ours.render_chat(HELLO), special_tokens=False)
        assert chat[0] == BEGIN
        assert BEGIN not in chat[1:]

    def test_a_split_that_is_not_known_is_refused(self, tmp_path: Path) -> None:
        file = write_llama(
            tmp_path / "m.gguf",
            random_llama(),
            change=lambda fields, _: fields.update({"tokenizer.ggml.pre": "klingon"}),
        )
        with pytest.raises(ModelError, match="splits text as 'klingon'; known are default, gpt-2"):
            convert(file, tmp_path / "out")

    def test_sentencepiece(self, tmp_path: Path) -> None:
        """As LLaMA 2: scores instead of merges, bytes for what has no token."""
        words = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "w", "▁w"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
        kinds = [2, 3, 3, *([6] * 256), *([1] * len(words))]
        fields = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(words))],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 2,
        }

        def change(given: Fields, arrays: Arrays) -> None:
            del given["tokenizer.ggml.pre"], given["tokenizer.ggml.merges"]
            given |= fields | {"llama.vocab_size": len(tokens)}

        file = write_llama(tmp_path / "m.gguf", random_llama(vocab_size=len(tokens)), change=change)
        convert(file, tmp_path / "out")
        ours = load_tokenizer("m", None, config_of(tmp_path / "out"))
        ids = ours.encode("hello w日\n")
        assert ids[0] == 1
        assert tokens[ids[1]] == "▁hello"
        assert ours.decode(ids) == " hello w日\n"

        for adds_space, expected in (
            (True, ["<s>", "<s>", "▁hello", "</s>", "▁hello"]),
            (False, ["<s>", "<s>", "hello", "</s>", "hello"]),
        ):
            fields["tokenizer.ggml.add_space_prefix"] = adds_space
            file = write_llama(
                tmp_path / "m.gguf", random_llama(vocab_size=len(tokens)), change=change
            )
            convert(file, tmp_path / f"{adds_space}")
            ours = load_tokenizer("m", None, config_of(tmp_path / f"{adds_space}"))
            assert [tokens[one] for one in ours.encode("<s>hello</s>hello")] == expected

    def test_chat_template(self, directory: Path) -> None:
        ours = load_tokenizer("m", None, config_of(directory))
        ids = ours.encode(ours.render_chat(HELLO), special_tokens=False)
        text = "<|begin|>user: Hello<|im_end|>\nassistant: "
        assert ids == byte_level_bpe().encode(text).ids
        assert ids[0] == BEGIN
        assert ours.decode(ids) == "user: Hello\nassistant: "


def remove(*keys: str) -> Callable[[Fields, Arrays], None]:
    def change(fields: Fields, arrays: Arrays) -> None:
        for key in keys:
            (fields if key in fields else arrays).pop(key)

    return change


def add(**arrays_added: list[int]) -> Callable[[Fields, Arrays], None]:
    def change(fields: Fields, arrays: Arrays) -> None:
        for name, shape in arrays_added.items():
            arrays[name.replace("__", ".")] = np.zeros(shape, dtype=np.float32)

    return change


class TestRefused:
    """Each of these is one line of text, which `converted` puts behind the file's name."""

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
        assert "damaged, or no GGUF file" in self.message(tmp_path / "m.gguf", tmp_path)

    @pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.999])
    def test_truncated(self, tmp_path: Path, share: float) -> None:
        file = write_llama(tmp_path / "m.gguf", random_llama())
        os.truncate(file, int(file.stat().st_size * share))
        assert "damaged, or no GGUF file" in self.message(file, tmp_path)

    def test_other_architecture(self, tmp_path: Path) -> None:
        model = random_llama()
        file = write_gguf(
            tmp_path / "m.gguf", metadata(model.config), tensors(model), architecture="qwen2"
        )
        message = self.message(file, tmp_path)
        assert "architecture is 'qwen2'; GGUF files are supported for 'llama'" in message

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
            (remove("tokenizer.ggml.merges"), "its tokenizer cannot be read"),
            (remove("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
            (
                lambda fields, _: fields.update({"split.count": 2}),
                "one part of a model in several files; join them with `llama-gguf-split --merge`",
            ),
            (
                lambda fields, _: fields.update({"llama.attention.head_count": 3}),
                "its metadata: num_key_value_heads is 2, expected a divisor of the 3 heads",
            ),
            (
                lambda _, arrays: arrays.update(
                    {"blk.0.attn_k.weight": np.zeros((7, 64), dtype=np.float32)}
                ),
                "tensor 'blk.0.attn_k.weight' (F32) cannot be read",
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

    def test_missing_tensor_is_named_when_the_model_is_loaded(self, tmp_path: Path) -> None:
        file = write_llama(
            tmp_path / "m.gguf", random_llama(), change=remove("blk.1.ffn_up.weight")
        )
        convert(file, tmp_path / "out")
        with pytest.raises(ModelError, match=r"lacks layers\.1\.mlp\.up_proj\.weight"):
            load(tmp_path / "out")

    def test_no_such_file(self) -> None:
        with pytest.raises(ModelError, match=r"'nowhere/m\.gguf': there is no such file"):
            load_model_config("nowhere/m.gguf", load_format="auto")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of converted files; in the end it holds nothing but whole ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "cache" / "fastserve" / "gguf"
    yield directory
    for one in directory.glob("*"):
        assert one.name.startswith("m-")
        load_model_config(str(one), load_format="auto")


class TestCache:
    def test_two_processes_at_once_then_none(self, cache: Path, tmp_path: Path) -> None:
        file = write_llama(tmp_path / "m.gguf", random_llama())
        code = "import sys; from pathlib import Path\n"
        code += "from fastserve_backend.models.gguf import converted\n"
        code += "print(converted(Path(sys.argv[1])))"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(file)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        directories = {process.communicate(timeout=120)[0].strip() for process in processes}
        assert [process.returncode for process in processes] == [0, 0]
        assert len(directories) == 1
        assert [str(one) for one in cache.iterdir()] == list(directories)
        made = Path(directories.pop())
        assert_equal(tensors_of(made), bfloat16(random_llama()))
        # What is there is taken as it is, by every name of the file.
        (made / "mark").touch()
        (tmp_path / "link.gguf").symlink_to(file)
        assert converted(file) == made
        config = load_model_config(str(file), load_format="auto")
        assert config.directory == str(made)
        assert (made / "mark").exists()

    def test_a_file_that_changed(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fastserve_backend.models.gguf._convert", convert)  # in this process
        file = write_llama(tmp_path / "m.gguf", random_llama())
        first = converted(file)
        other = random_llama(tie_word_embeddings=True)
        second = converted(write_llama(file, other))
        assert second != first
        assert_equal(tensors_of(second), bfloat16(other))

    def test_nothing_is_left_of_a_failure(self, cache: Path, tmp_path: Path) -> None:
        """In its last tensor, when most has been written."""
        file = write_llama(
            tmp_path / "m.gguf", random_llama(), change=add(blk__9__odd__weight=[4, 4])
        )
        with pytest.raises(ModelError) as error:
            load_model_config(str(file), load_format="auto")
        message = "tensor 'blk.9.odd.weight' belongs to no plain LLaMA model"
        assert str(error.value) == f"{file}: {message}"
        assert list(cache.iterdir()) == []

    def test_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = random_llama()
        file = write_llama(tmp_path / "m.gguf", model)
        needed = 2 * sum(parameter.numel() for parameter in model.parameters())
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, needed - 1))
        with pytest.raises(ModelError, match=r"takes 0\.0 GiB in .*XDG_CACHE_HOME"):
            convert(file, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, needed))
        convert(file, tmp_path / "out")

    def test_cache_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a_file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
        file = write_llama(tmp_path / "m.gguf", random_llama())
        with pytest.raises(ModelError, match="set XDG_CACHE_HOME to a directory"):
            converted(file)
