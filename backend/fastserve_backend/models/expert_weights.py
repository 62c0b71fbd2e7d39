"""The forms in which checkpoints store experts, brought to one.

Below a layer, `Experts` wants ``mlp.gate.weight`` and, for expert N, ``mlp.experts.N.gate_proj``,
``up_proj`` and ``down_proj``, as Qwen and OLMoE store them. The bias of a router's choice is
``mlp.choice_bias``, a shared expert ``mlp.shared_expert``. Others are:

- Other names of the same tensors (`_OTHER_NAMES`), and a bias [1, experts].
- All experts in one tensor, as transformers 5 has them in memory: ``mlp.experts.gate_up_proj``
  [experts, 2 · features, hidden], gate first, and ``mlp.experts.down_proj``. Qwen3-VL has them
  transposed. Granite's shared expert also has gate and up in one tensor.
- gpt-oss's: ``mlp.router``, and the same tensors transposed, with biases and with the rows of gate
  and up in turn. One expert's ``gate_up_proj`` stays one tensor here.
- gpt-oss's in MXFP4: ``…_blocks`` and ``…_scales``, see `mxfp4`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from fastserve_kernels.quantized_weight import QuantizedWeight

from fastserve_backend.checkpoints.experts_config import ExpertsConfig
from fastserve_backend.models.mxfp4 import mxfp4_weight
from fastserve_backend.models.weights import (
    Shard,
    StoredTensor,
    StoredWeight,
    WeightSource,
    split_rows,
)

_IN_BLOCK = re.compile(r"(layers\.\d+)\.(?:(?:mlp|block_sparse_moe)\.|(?=shared_mlp\.))(.+)")
_OTHER_NAMES = {
    # Mixtral, MiniMax and Phi-MoE
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "router": "gate",
    "shared_experts": "shared_expert",  # GLM, ERNIE and dots.llm1
    "shared_mlp": "shared_expert",  # Hunyuan
}
_GATE_UP = ("gate", "up")
_CHOICE_BIAS = "e_score_correction_bias"
_WHOLE_NAMES = {
    # Granite
    "router.layer.weight": "gate.weight",
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "shared_mlp.input_linear.weight": "shared_expert.gate_up_proj.weight",
    "shared_mlp.output_linear.weight": "shared_expert.down_proj.weight",
    "gate.wg.weight": "gate.weight",  # Hunyuan
}
"""Of tensors below a block."""
_BLOCKS, _SCALES = "_blocks", "_scales"


def experts_apart(source: WeightSource, config: ExpertsConfig) -> Iterator[StoredTensor]:
    """The source's tensors, those of experts by the names above. Others pass through.

    Names are those below the model ("layers.0.mlp…").
    """
    halves: dict[str, StoredTensor] = {}
    for stored in source:
        match = _IN_BLOCK.fullmatch(stored.name)
        if match is None:
            yield stored
            continue
        layer, name = match.groups()
        if name.endswith((_BLOCKS, _SCALES)):
            whole = _joined(stored, halves)
            if whole is None:
                continue
            stored, name = whole, name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        name = _WHOLE_NAMES.get(name, name)
        name = ".".join(_OTHER_NAMES.get(part, part) for part in name.split("."))
        if name.endswith(_CHOICE_BIAS):
            yield _as_row(replace(stored, name=f"{layer}.mlp.choice_bias"))
        else:
            yield from _parts(replace(stored, name=f"{layer}.mlp.{name}"), config)
    yield from halves.values()  # nobody wants them, which is an error that names them


def _as_row(stored: StoredTensor) -> StoredTensor:
    """A bias [1, experts] as [experts]."""
    if len(stored.shape) != 2 or stored.shape[0] != 1:
        return stored
    return replace(
        stored,
        shape=stored.shape[1:],
        read=lambda shard: stored.read_dequantized((slice(0, 1), *shard))[0],
    )


def _joined(stored: StoredTensor, halves: dict[str, StoredTensor]) -> StoredTensor | None:
    """A tensor in MXFP4 as [experts, columns, rows], like one in bfloat16, when both of its halves
    are there; otherwise this half is kept."""
    name = stored.name.removesuffix(_BLOCKS).removesuffix(_SCALES)
    ending = _SCALES if stored.name.endswith(_BLOCKS) else _BLOCKS
    other = halves.pop(name + ending, None)
    if other is None:
        halves[stored.name] = stored
        return None
    blocks, scales = (other, stored) if ending == _BLOCKS else (stored, other)
    if len(blocks.shape) != 4 or blocks.shape[:3] != scales.shape:
        return blocks  # its shape is refused, by name
    experts, rows, groups, size = blocks.shape
    read = partial(_read_mxfp4, blocks, scales)
    return StoredTensor(name, (experts, groups * size * 2, rows), "mxfp4", True, read)


def _read_mxfp4(blocks: StoredTensor, scales: StoredTensor, shard: Shard) -> QuantizedWeight:
    """Of a shard of one expert: its matrix [out, in], which is not transposed."""
    (of_blocks,), (of_scales,) = blocks.read_dequantized(shard), scales.read_dequantized(shard)
    return mxfp4_weight(of_blocks, of_scales)


def _parts(stored: StoredTensor, config: ExpertsConfig) -> Iterator[StoredTensor]:
    """Each expert's part, if the tensor has all experts; otherwise the tensor itself."""
    block, _, name = stored.name.rpartition(".")
    is_bias = name.endswith("_bias")
    name, ffn = name.removesuffix("_bias"), config.intermediate_size
    is_of_all = block.endswith(".experts") and name in ("gate_up_proj", "down_proj")
    if block.endswith("shared_expert.gate_up_proj"):
        size, shared = config.shared_size, block.removesuffix(".gate_up_proj")
        yield from split_rows(stored, {f"{shared}.{one}_proj.{name}": size for one in _GATE_UP})
        return
    if not is_of_all or len(stored.shape) != (2 if is_bias else 3):
        yield stored
        return
    is_transposed = not is_bias and (config.is_fused or _is_transposed(stored, name, config))
    width = stored.shape[-1 if is_transposed else 1]
    rows = {name: slice(0, width)}
    if name == "gate_up_proj" and not config.is_fused:
        rows = {"gate_proj": slice(0, ffn), "up_proj": slice(ffn, width)}
    for expert in range(stored.shape[0]):
        for part, own in rows.items():
            shape: tuple[int, ...] = (own.stop - own.start,)
            if not is_bias:
                shape += (stored.shape[1 if is_transposed else 2],)
            yield replace(
                stored,
                name=f"{block}.{expert}.{part}.{'bias' if is_bias else 'weight'}",
                shape=shape,
                read=partial(_read_expert, stored, expert, own, is_transposed),
            )


def _is_transposed(stored: StoredTensor, name: str, config: ExpertsConfig) -> bool:
    """Whether each expert's matrix is [in, out]. If both forms would fit, it is, as in the
    published files."""
    ffn = config.intermediate_size
    in_place = stored.shape[1] == ffn if name == "down_proj" else stored.shape[2] == 2 * ffn
    return config.may_be_transposed and in_place


def _read_expert(
    stored: StoredTensor, expert: int, rows: slice, is_transposed: bool, shard: Shard
) -> StoredWeight:
    """Some rows of an expert's part; `shard` is the whole, as ranks have whole experts."""
    assert shard == ()
    of_expert = slice(expert, expert + 1)
    if not is_transposed:
        return stored.read_dequantized((of_expert, rows))[0]
    weight = stored.read((of_expert,))
    # In few bits it is the expert's matrix [out, in] already.
    return weight if isinstance(weight, QuantizedWeight) else weight[0].T[rows]
