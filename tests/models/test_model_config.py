"""Model configurations: built-in sizes, config.json, and users' mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import builtin_names, load_model_config
from fastserve_backend.checkpoints.opt_config import OPTConfig

SMALL: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 301,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 80,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "torch_dtype": "float16",
}


def write(directory: Path, **changes: Any) -> str:
    """Writes a model directory with SMALL's config.json. A change to None removes the field."""
    fields = {k: v for k, v in {**SMALL, **changes}.items() if v is not None}
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


def load(model: str, **options: Any) -> OPTConfig:
    config = load_model_config(model, **{"load_format": "dummy", **options})
    assert isinstance(config, OPTConfig)
    return config


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("opt-125m", 0.125),
        ("opt-1.3b", 1.3),
        ("opt-2.7b", 2.7),
        ("opt-6.7b", 6.7),
        ("opt-13b", 13),
        ("opt-66b", 66),
        ("opt-175b", 175),
    ],
)
def test_builtin_sizes(name: str, billions: float) -> None:
    config = load(name)
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.03)
    assert (config.name, config.directory, config.max_model_len) == (name, None, 2048)
    assert config.eos_token_ids == (2,)
    assert name in builtin_names()


def test_kv_bytes_per_block() -> None:
    # 2 (key, value) x 40 layers x 5120 x 16 tokens x 2 bytes
    assert load("opt-13b").kv_bytes_per_block(16) == 13_107_200
    assert load("opt-125m", dtype="float32").kv_bytes_per_block(8) == 2 * 12 * 768 * 8 * 4
    # 12 heads of 64 codes and a scale.
    rounded = load("opt-125m", kv_dtype="int8")
    assert rounded.kv_bytes_per_block(8) == 2 * 12 * 12 * (64 + 4) * 8
    assert rounded.host_kv_bytes_per_block(8, "int8") == rounded.kv_bytes_per_block(8)


@pytest.mark.parametrize(
    ("stored", "asked", "device", "expected"),
    [
        ({"torch_dtype": "float16"}, "auto", "cpu", "bfloat16"),
        ({"torch_dtype": "float16"}, "auto", "cuda", "float16"),
        ({"torch_dtype": None, "dtype": "float16"}, "auto", "cuda", "float16"),
        ({"torch_dtype": "bfloat16"}, "auto", "cpu", "bfloat16"),
        ({"torch_dtype": "float32"}, "auto", "cuda", "float32"),
        ({"torch_dtype": None}, "auto", "cpu", "float32"),
        ({"torch_dtype": "float16"}, "float32", "cpu", "float32"),
        ({"torch_dtype": "float16"}, "float16", "cpu", "float16"),
    ],
)
def test_dtype(
    tmp_path: Path, stored: dict[str, Any], asked: str, device: str, expected: str
) -> None:
    assert load(write(tmp_path, **stored), dtype=asked, device=device).dtype == expected


def test_fields_left_out_take_transformers_defaults(tmp_path: Path) -> None:
    from transformers import OPTConfig as TheirConfig

    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    ours, theirs = load(str(tmp_path)), TheirConfig()
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.intermediate_size == theirs.ffn_dim
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.word_embed_proj_dim == theirs.word_embed_proj_dim
    assert ours.activation == theirs.activation_function
    assert ours.do_layer_norm_before is theirs.do_layer_norm_before
    assert ours.has_final_layer_norm is not theirs._remove_final_layer_norm
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.enable_bias is theirs.enable_bias
    assert ours.layer_norm_elementwise_affine is theirs.layer_norm_elementwise_affine
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_end_tokens(tmp_path: Path) -> None:
    assert load(write(tmp_path, eos_token_id=5)).eos_token_ids == (5,)
    assert load(write(tmp_path, eos_token_id=[5, 6])).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load(str(tmp_path)).eos_token_ids == (5, 6, 7, 8)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "eos_token_id": None}))
    assert load(str(tmp_path)).eos_token_ids == ()
    # transformers agrees: no token has that id.
    assert load(write(tmp_path, eos_token_id=-1)).eos_token_ids == ()
    # The sampler bans end tokens by their index in a row of logits.
    beyond = write(tmp_path, eos_token_id=[5, SMALL["vocab_size"]])
    assert load(beyond).eos_token_ids == (5,)


def test_max_model_len(tmp_path: Path) -> None:
    model = write(tmp_path)
    assert load(model).max_model_len == 48
    assert load(model, max_model_len=20).max_model_len == 20
    assert load(model, max_model_len=20).max_position_embeddings == 48
    with pytest.raises(ModelError, match="max_model_len is 49, but the model has 48 positions"):
        load(model, max_model_len=49)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert', expected one of apertus, arcee, "),
        ({"model_type": None}, "model_type is None, expected one of apertus, arcee, "),
        ({"hidden_size": 30}, "hidden_size is 30, expected a multiple of num_attention_heads, 4"),
        ({"num_attention_heads": 8}, "hidden_size / heads is 4, but .* need a multiple of 8"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"ffn_dim": 3.5}, "ffn_dim is 3.5"),
        ({"enable_bias": "yes"}, "enable_bias is 'yes', expected true or false"),
        ({"activation_function": "swish"}, "activation_function is 'swish', expected one of relu"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64', expected one of float32"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is"),
        (
            {"eos_token_id": -2},
            "eos_token_id is -2, expected a token id, a list of them, null or -1",
        ),
        ({"quantization_config": {"bits": 4}}, "quant_method is None, expected awq, gptq,"),
        ({"model_type": "gemma3"}, "text_config is None, expected an object"),
    ],
)
def test_bad_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(write(tmp_path, **changes))


def test_builtin_has_no_weights() -> None:
    with pytest.raises(ModelError, match=r"opt-125m.*without weights: use load_format dummy"):
        load("opt-125m", load_format="auto")


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/dir", "~/no/such/dir"])
def test_a_path_that_is_not_there(model: str) -> None:
    with pytest.raises(ModelError, match=f"^model '{model}': there is no such directory or file$"):
        load(model)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(ModelError, match=r"does not end in \.gguf; give a GGUF file, or a dir"):
        load(str(path))


@pytest.mark.parametrize("model", ["opt-30b", "a/b/c", ""])
def test_unknown_name_lists_the_known(model: str) -> None:
    with pytest.raises(ModelError, match=r"built-in names are smollm2-135m-instruct and,"):
        load(model)


@pytest.mark.parametrize("ending", ["", ".gguf"])
def test_a_name_that_the_system_refuses(ending: str) -> None:
    """The name is too long. The system refuses names in unsearchable directories alike, though not
    to root."""
    with pytest.raises(ModelError, match=r"^model '\./n{300}"):
        load_model_config(f"./{'n' * 300}{ending}", load_format="auto")


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[1]", "\udc80"])
def test_config_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load(str(tmp_path))


def test_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"holds no weights \(model\.safetensors.*load_format dummy"
    ):
        load(write(tmp_path), load_format="auto")


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_hub_id_without_network(offline_hub: Path) -> None:
    with pytest.raises(
        ModelError, match=r"owner/name.*cannot be fetched.*check the name and the net"
    ):
        load("owner/name", load_format="auto")


def test_hub_id_from_the_cache(offline_hub: Path) -> None:
    repository = offline_hub / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    write(snapshot)
    config = load("owner/name")
    assert (config.name, config.directory) == ("owner/name", str(snapshot))
