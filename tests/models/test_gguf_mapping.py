"""Models whose GGUF files are in few bits compute what the dequantized weights give."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.gguf_index import INDEX_FILE
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import DType, Quantization
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.gguf_weights import gguf_tensors
from fastserve_backend.models.loader import load_model
from fastserve_backend.models.model_part import TensorGroup
from fastserve_kernels.quantized_weight import QuantizedWeight
from gguf import GGMLQuantizationType as Kind
from gguf_files import Blocks, metadata, random_llama, tensors, write_gguf
from log_records import messages_of
from paged_executor import PagedExecutor, prompts
from rank_threads import DividedModel
from torch import Tensor
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("conversions_anywhere")

HIDDEN, FFN = 256, 512
# Layer 0 has a type for each matrix, as files of llama.cpp have.
MIXED = {
    "token_embd": "Q6_K",
    "output": "Q8_0",
    "blk.0.attn_q": "Q4_K",
    "blk.0.attn_k": "Q6_K",
    "blk.0.attn_v": "Q5_1",
    "blk.0.attn_output": "Q5_K",
    "blk.0.ffn_gate": "Q4_0",
    "blk.0.ffn_up": "Q4_1",
    "blk.0.ffn_down": "Q5_0",
}
LIBRARY = {"blk.1.attn_q": "IQ4_NL", "blk.1.ffn_gate": "Q2_K", "blk.1.ffn_down": "Q3_K"}


def llama(**changes: bool) -> LlamaForCausalLM:
    return random_llama(hidden_size=HIDDEN, intermediate_size=FFN, **changes)


def write_pair(directory: Path, model: LlamaForCausalLM, kinds: dict[str, str]) -> None:
    """Converts a file with matrices of these types to `directory`/stored, and one with the same
    values in float32 to `directory`/exact."""
    fields, arrays = metadata(model.config), tensors(model)
    blocks = {f"{name}.weight": kind for name, kind in kinds.items()}
    stored = {name: Blocks.random(kind, *arrays[name].shape) for name, kind in blocks.items()}
    exact = arrays | {name: one.dequantized() for name, one in stored.items()}
    convert(
        write_gguf(directory / "m.gguf", fields, arrays, kind=Kind.F16, blocks=stored),
        directory / "stored",
    )
    for name, array in exact.items():
        if array.ndim > 1 and name not in stored:
            exact[name] = array.astype(np.float16).astype(np.float32)
    convert(write_gguf(directory / "exact.gguf", fields, exact), directory / "exact")


def loaded(
    directory: Path,
    dtype: DType,
    quantization: Quantization | None = None,
    tensor: TensorGroup | None = None,
) -> CausalLM:
    config = load_model_config(
        str(directory), load_format="auto", dtype=dtype, quantization=quantization
    )
    return load_model(config, torch.device("cpu"), tensor=tensor or TensorGroup())


def logits(model: CausalLM, theirs: LlamaForCausalLM, dtype: DType) -> list[Tensor]:
    executor = PagedExecutor(model, theirs.config, prompts(30, 7), seed=1)
    executor.cast(getattr(torch, dtype))
    executor.step([(0, 30), (1, 7)])
    return [torch.stack(job.logits) for job in executor.jobs]


@pytest.mark.parametrize("quantization", [None, "as_stored", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kinds", "is_tied"),
    [(MIXED, False), (MIXED | LIBRARY, False), ({"token_embd": "Q4_1"}, True)],
    ids=["mixed", "library", "tied"],
)
def test_logits_are_those_of_the_dequantized_weights(
    tmp_path: Path,
    kinds: dict[str, str],
    is_tied: bool,
    dtype: DType,
    quantization: Quantization | None,
) -> None:
    """Bit for bit. But in bfloat16 the kernels may round rows to 8 bits, see `QuantizedLinear`."""
    model = llama(tie_word_embeddings=is_tied)
    if is_tied:
        kinds = {name: kind for name, kind in kinds.items() if name != "output"}
    write_pair(tmp_path, model, kinds)
    got = logits(loaded(tmp_path / "stored", dtype, quantization), model, dtype)
    expected = logits(loaded(tmp_path / "exact", dtype, quantization), model, dtype)
    for one, other in zip(got, expected, strict=True):
        assert torch.isfinite(other).all()
        if dtype == "bfloat16" and quantization in (None, "as_stored"):
            # These random weights make much of rounding: bfloat16 itself is 4% off float32.
            assert (one.float() - other.float()).norm() < 0.2 * other.float().norm()
        else:
            assert torch.equal(one, other)


def test_matrices_stay_in_few_bits_and_their_types_are_counted(tmp_path: Path) -> None:
    model = llama()
    write_pair(tmp_path, model, MIXED)
    kept = {
        stored.name: stored.dtype
        for stored in gguf_tensors(tmp_path / "stored")
        if isinstance(stored.read(()), QuantizedWeight)
    }
    assert sorted(kept.values()) == sorted(MIXED.values())
    config = load_model_config(str(tmp_path / "stored"), load_format="auto")
    assert config.quantization == "as_stored"
    arrays = tensors(model)
    sizes = {f"{name}.weight": kind for name, kind in MIXED.items()}
    expected = sum(
        Blocks.random(sizes[name], *array.shape).data.nbytes if name in sizes else 2 * array.size
        for name, array in arrays.items()
    )
    assert config.weight_bytes == config.stored_weight_bytes == expected
    rounded = load_model_config(str(tmp_path / "stored"), load_format="auto", quantization="int8")
    assert rounded.quantization == "int8"
    exact = load_model_config(str(tmp_path / "exact"), load_format="auto", quantization="as_stored")
    assert exact.quantization is None
    assert exact.weight_bytes == 2 * exact.num_parameters


def test_dequantized_types_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_pair(tmp_path, llama(), MIXED | LIBRARY)
    caplog.set_level(logging.WARNING)
    loaded(tmp_path / "stored", "bfloat16")
    (message,) = messages_of(caplog, "fastserve_backend.models")
    assert "m.gguf: matrices in IQ4_NL, Q2_K, Q3_K are dequantized" in message


def test_two_ranks_have_their_parts(tmp_path: Path) -> None:
    model = llama()
    write_pair(tmp_path, model, MIXED | {"blk.0.attn_output": "Q5_0"})
    results = []
    for name in ("stored", "exact"):
        config = load_model_config(str(tmp_path / name), load_format="auto", dtype="float32")
        results.append(logits(DividedModel(config, 2, 1), model, "float32"))  # type: ignore[arg-type]
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def test_a_rank_cannot_have_a_part_of_a_block(tmp_path: Path) -> None:
    """Half of 256 columns is half of a Q6_K block, but four blocks of Q8_0."""
    write_pair(tmp_path, llama(), {"blk.0.attn_output": "Q8_0", "blk.1.attn_output": "Q6_K"})
    second = TensorGroup(1, 2)
    with pytest.raises(ModelError) as error:
        loaded(tmp_path / "stored", "bfloat16", tensor=second)
    assert str(error.value) == (
        "tensor 'blk.1.attn_output.weight' (Q6_K) is stored in blocks of 256 columns, but a rank's "
        "part is from 128 to 256 of 256; lower tensor_parallel_size, or set quantization int8"
    )
    loaded(tmp_path / "stored", "bfloat16", "int8", tensor=second)


def test_a_damaged_index(tmp_path: Path) -> None:
    write_pair(tmp_path, llama(), {})
    index = tmp_path / "stored" / INDEX_FILE
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"stored/gguf\.json is damaged .*; remove .*/stored$"):
        load_model_config(str(tmp_path / "stored"), load_format="auto")
