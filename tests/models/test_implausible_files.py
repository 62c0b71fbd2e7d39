"""Files of a model that state absurd numbers, or are damaged, are refused at once by a typed error.
Nothing of that size is computed, and no memory is taken for it."""

from __future__ import annotations

import json
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fastserve_backend.checkpoints.architectures import ARCHITECTURES
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.gguf_file import GGUFFile
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.weights import checkpoint_tensors
from gguf_files import Arrays, Fields, random_llama, write_llama
from hypothesis import given
from hypothesis import strategies as st
from matrices import random_examples
from safetensors.torch import save_file
from test_chat_template import write_tokenizer

AGAIN = "is plausible; the file is damaged, download it again"
# Above what any of these files needs, and far below what they ask for.
MOST_KIB = 256 << 10
ODD_BYTES = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from([0, 1, 8, 9, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1]).map(
        lambda number: struct.pack("<Q", number)
    ),
)
EDITS = st.lists(st.tuples(st.integers(0), ODD_BYTES, st.booleans()), min_size=1, max_size=5)
ODD_NUMBERS = (-1, 0, 1, 7, 1.5, 1e-320, 1e300, 10**400, 1 << 31, float("nan"), float("inf"))
ODD_VALUES = st.sampled_from([*ODD_NUMBERS, "x", "", [], {}, [1], [[[]]], {"a": 1}, None, True, 64])
FIELDS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window"),
    *("max_window_layers", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "rope_theta"),
    *("partial_rotary_factor", "rms_norm_eps", "layer_types", "eos_token_id", "torch_dtype"),
    *("original_max_position_embeddings", "query_pre_attn_scalar", "sliding_window_pattern"),
    *("no_rope_layers", "no_rope_layer_interval", "clip_qkv", "use_sliding_window", "ffn_dim"),
    *("quantization_config", "rope_scaling", "logits_scaling", "word_embed_proj_dim"),
)
ROPE = (
    *("rope_type", "factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "attention_factor", "mscale", "original_max_position_embeddings"),
    *("rope_theta", "truncate", "llama_4_scaling_beta"),
)
ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")


@contextmanager
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


def refusal(read: Callable[[], object]) -> str:
    with little_memory(), pytest.raises(ModelError) as error:
        read()
    return str(error.value)


def edited(data: bytes, end: int, edits: list[tuple[int, bytes, bool]]) -> bytes:
    """With some of the first ``end`` bytes replaced, or removed."""
    copy = bytearray(data)
    for at, new, removes in edits:
        start = at % end
        copy[start : start + len(new)] = b"" if removes else new
    return bytes(copy)


# --- config.json ----------------------------------------------------------------------------------


def read_config(directory: Path, fields: dict[str, Any]) -> object:
    (directory / "config.json").write_text(json.dumps(fields))
    return load_model_config(str(directory), load_format="dummy")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("num_hidden_layers", 10**12, "a plausible integer, at most 1024"),
        ("num_hidden_layers", -1, "an integer of at least 1"),
        ("hidden_size", 1 << 40, "a plausible integer, at most 131072"),
        ("hidden_size", 64.0, "an integer of at least 1"),
        ("num_attention_heads", 0, "an integer of at least 1"),
        ("vocab_size", 10**9, "a plausible integer, at most 4194304"),
        ("vocab_size", float("nan"), "an integer of at least 1"),
        ("intermediate_size", "big", "an integer of at least 1"),
        ("max_position_embeddings", 1 << 50, "a plausible integer, at most 16777216"),
        ("rope_theta", 10**400, "a plausible number, from 1e-30 to 1e+30"),
        ("rms_norm_eps", 1e-320, "a plausible number, from 1e-30 to 1e+30"),
        ("rms_norm_eps", float("nan"), "a number above 0"),
        ("eos_token_id", [1] * 2000, "at most 1024 token ids"),
    ],
)
def test_an_absurd_field(tmp_path: Path, field: str, value: Any, allowed: str) -> None:
    message = refusal(lambda: read_config(tmp_path, {"model_type": "llama", field: value}))
    shown = repr(value) if len(repr(value)) <= 200 else f"{value!r}"[:200] + "…"
    assert message == f"{tmp_path}/config.json: {field} is {shown}, expected {allowed}"


def test_sizes_whose_product_is_absurd(tmp_path: Path) -> None:
    sizes = {"hidden_size": 131072, "intermediate_size": 1 << 20, "num_attention_heads": 1024}
    fields = {"model_type": "llama", "num_hidden_layers": 1024, **sizes}
    message = refusal(lambda: read_config(tmp_path, fields))
    assert "config.json: the number of parameters is 49" in message
    assert message.endswith(f"but at most {10**14} {AGAIN}")


@random_examples(600)
@given(
    model_type=st.sampled_from(sorted(ARCHITECTURES)),
    fields=st.dictionaries(st.sampled_from(FIELDS), ODD_VALUES, max_size=3),
    rope=st.none() | st.dictionaries(st.sampled_from(ROPE), ODD_VALUES, max_size=3),
    rope_type=st.sampled_from(ROPE_TYPES),
)
def test_any_config_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    model_type: str,
    fields: dict[str, Any],
    rope: dict[str, Any] | None,
    rope_type: str,
) -> None:
    if rope is not None:
        usual = {"rope_type": rope_type, "factor": 8.0, "low_freq_factor": 1.0}
        fields = fields | {"rope_parameters": usual | {"high_freq_factor": 4.0} | rope}
    with little_memory(), suppress(ModelError):
        read_config(tmp_path_factory.getbasetemp(), {"model_type": model_type, **fields})


# --- Whole files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_of_a_gigabyte(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with (tmp_path / name).open("ab") as file:
        file.truncate(1 << 30)
    message = refusal(lambda: load_model_config(str(tmp_path), load_format="dummy"))
    assert message.startswith(
        f"{tmp_path / name}: its size in bytes is {1 << 30}, but at most 1677"
    )


def test_a_configuration_of_nested_lists(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    message = refusal(lambda: load_model_config(str(tmp_path), load_format="dummy"))
    assert "config.json cannot be read as JSON" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_of_a_gigabyte(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path)
    with (tmp_path / name).open("ab") as file:
        file.truncate(1 << 30)
    message = refusal(lambda: HFTokenizer(tmp_path, 300))
    assert message.startswith(f"{tmp_path / name}: its size in bytes is {1 << 30}, but at most ")


def test_a_template_of_megabytes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="x" * (2 << 20))
    message = refusal(lambda: HFTokenizer(tmp_path, 300))
    size = f"is {2 << 20}, but at most {1 << 20} {AGAIN}"
    assert message == f"the size of the chat template of tokenizer_config.json {size}"


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\0" * 10, b'{"weight_map": {"a": "../b"}}'])
def test_a_damaged_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    message = refusal(lambda: list(checkpoint_tensors(tmp_path)))
    assert "model.safetensors.index.json" in message
    with (tmp_path / "model.safetensors.index.json").open("ab") as file:
        file.truncate(1 << 30)
    assert "its size in bytes" in refusal(lambda: list(checkpoint_tensors(tmp_path)))


# --- safetensors ----------------------------------------------------------------------------------


def safetensors(directory: Path, header: Any, size: int | None = None, num_bytes: int = 16) -> None:
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text) if size is None else size) + text)
        file.truncate(8 + len(text) + num_bytes)


def described(shape: list[Any], start: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("num_bytes", [16, 64 << 30])
@pytest.mark.parametrize("size", [1 << 26, 1 << 40, (1 << 64) - 1])
def test_a_long_header(tmp_path: Path, size: int, num_bytes: int) -> None:
    safetensors(tmp_path, {}, size, num_bytes)  # the file is sparse
    message = refusal(lambda: list(checkpoint_tensors(tmp_path)))
    assert message == (
        f"weight file {tmp_path}/model.safetensors: its header's size in bytes is {size}, but at "
        f"most {32 << 20} {AGAIN}"
    )


@pytest.mark.parametrize(
    "header",
    [
        {"a": described([1 << 62, 4], 0, 16)},
        {"a": described([-4], 0, 16)},
        {"a": described([2.5], 0, 16)},
        {"a": described([4], 16, 0)},
        {"a": described([4], 0, 1 << 63)},
        {"a": described([1 << 40], 0, 1 << 42)},
        {"a": described([4], 0, 16), "b": described([4], 0, 16)},  # they overlap
        {"a": described([2], 0, 8), "b": described([1], 12, 16)},  # with a gap
        {"a": described([4], 0, 16, "F1000")},
        {"a": {"dtype": "F32"}},
        ["a"],
    ],
)
def test_absurd_tensors(tmp_path: Path, header: Any) -> None:
    safetensors(tmp_path, header)
    message = refusal(lambda: list(checkpoint_tensors(tmp_path)))
    assert message.startswith(f"weight file {tmp_path}/model.safetensors is damaged or incomplete")


@random_examples(600)
@given(edits=EDITS)
def test_any_safetensors_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes, bool]]
) -> None:
    directory = tmp_path_factory.getbasetemp()
    file = directory / "model.safetensors"
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5).half()}, file)
    data = file.read_bytes()
    file.write_bytes(edited(data, 8 + struct.unpack("<Q", data[:8])[0], edits))
    with little_memory(), suppress(ModelError):
        for stored in checkpoint_tensors(directory):
            stored.read(())


# --- GGUF -----------------------------------------------------------------------------------------

TEXT, ARRAY, UINT32 = 8, 9, 4


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def array(of: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", of, count) + content


def gguf_header(fields: int, tensors: int, content: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + content


def one_field(kind: int, value: bytes, name: str = "a") -> bytes:
    return gguf_header(1, 0, text(name) + struct.pack("<I", kind) + value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (gguf_header(1 << 63, 0), f"the number of metadata fields is {1 << 63}, but at most 16384"),
        (gguf_header(0, 1 << 31), f"the number of tensors is {1 << 31}, but at most 131072"),
        (
            gguf_header(1, 0, struct.pack("<Q", 1 << 62)),
            f"the name of metadata field 0: its length in bytes is {1 << 62}, but at most 16777216",
        ),
        (
            one_field(TEXT, struct.pack("<Q", 1 << 32)),
            f"metadata field a: its length in bytes is {1 << 32}, but at most 16777216",
        ),
        *(
            (
                one_field(ARRAY, array(of, 1 << 32)),
                f"metadata field a: its number of values is {1 << 32}, but at most 4194304",
            )
            for of in (TEXT, ARRAY, UINT32)
        ),
        (
            one_field(ARRAY, array(ARRAY, 1) * 9),
            "metadata field a: its depth of arrays is 5, but at most 4",
        ),
        (
            gguf_header(0, 1, text("t") + struct.pack("<I", 1 << 31)),
            f"tensor 't': its dimensions is {1 << 31}, but at most 4",
        ),
        (
            one_field(UINT32, struct.pack("<I", 1 << 30), "general.alignment"),
            f"metadata field general.alignment is {1 << 30}, but at most 1048576",
        ),
        *(
            (
                one_field(UINT32, struct.pack("<I", stated), "general.alignment"),
                f"metadata field general.alignment is {stated}, expected a power of 2",
            )
            for stated in (0, 3)
        ),
    ],
)
@pytest.mark.parametrize("num_bytes", [0, 64 << 30])
def test_an_absurd_header(tmp_path: Path, header: bytes, message: str, num_bytes: int) -> None:
    """The second file is as long as it says, with zeros behind its header."""
    file = tmp_path / "m.gguf"
    with file.open("wb") as opened:
        opened.write(header)
        opened.truncate(max(len(header), num_bytes))
    assert refusal(lambda: GGUFFile(file)).startswith(message)


def test_a_header_without_end(tmp_path: Path) -> None:
    """Each text is as long as a text may be."""
    file = tmp_path / "m.gguf"
    with file.open("wb") as opened:
        opened.write(gguf_header(100, 0))
        for _ in range(100):
            opened.write(text("a") + struct.pack("<IQ", TEXT, 16 << 20))
            opened.seek(16 << 20, 1)
        opened.truncate(opened.tell())
    with pytest.raises(ModelError, match="the header's size in bytes is 2684"):
        GGUFFile(file)


def test_a_token_of_a_megabyte(tmp_path: Path) -> None:
    """All ways to divide a token of SentencePiece are tried."""

    def change(fields: Fields, arrays: Arrays) -> None:
        fields["tokenizer.ggml.tokens"][-1] = "a" * (1 << 20)

    file = write_llama(tmp_path / "m.gguf", random_llama(), change=change)
    message = refusal(lambda: convert(file, tmp_path / "out"))
    assert message == f"token 300: its number of characters is {1 << 20}, but at most 4096 {AGAIN}"


@pytest.fixture(scope="module")
def gguf_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A GGUF file, and the length of its header."""
    file = write_llama(tmp_path_factory.mktemp("gguf") / "m.gguf", random_llama())
    return file.read_bytes(), min(tensor.start for tensor in GGUFFile(file).tensors.values())


@random_examples(600)
@given(edits=EDITS)
def test_any_gguf_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    gguf_data: tuple[bytes, int],
    edits: list[tuple[int, bytes, bool]],
) -> None:
    directory = tmp_path_factory.getbasetemp()
    (directory / "m.gguf").write_bytes(edited(*gguf_data, edits))
    shutil.rmtree(directory / "out", ignore_errors=True)
    with little_memory(), suppress(ModelError):
        convert(directory / "m.gguf", directory / "out")
