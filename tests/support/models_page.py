"""Writes the table of docs/models.md from the registry of architectures.

``make docs`` runs it. A test fails if the page differs from its output. What is compared is counted
from the variants that the tests of models take, so that no family is listed that none compares.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from decoder_checkpoints import VARIANTS as DECODERS
from fastserve_backend.checkpoints.architectures import ARCHITECTURES
from fastserve_backend.checkpoints.decoder_config import NORMS_AFTER, DecoderConfig
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.model_config import CommonFields, ModelConfig
from opt_checkpoints import VARIANTS as OPT
from rotary_checkpoints import VARIANTS as ROTARY
from transformers import PreTrainedConfig
from vision_checkpoints import WITH_IMAGES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_TABLE = re.compile(r"(<!-- table: families -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = (
    "| models | `model_type` | what it has beside LLaMA's parts | variants compared |\n"
    "|---|---|---|---|\n"
)
_COMMON: CommonFields = {
    "name": "",
    "directory": None,
    "load_format": "dummy",
    "dtype": "float32",
    "quantization": None,
    "kv_dtype": "same",
}


def with_table(page: str) -> str:
    """Returns the page with a new table."""
    variants: dict[str, list[PreTrainedConfig]] = defaultdict(list)
    for variant in (*DECODERS.values(), *ROTARY.values()):
        variants[variant.model_type].append(variant)
    for whole in WITH_IMAGES.values():
        text = whole.get_text_config()
        if text.model_type not in variants:
            variants[text.model_type].append(text)
    rows = []
    for name, architecture in ARCHITECTURES.items():
        configs = [
            architecture.read(HFConfig(one.to_dict(), name), **_COMMON) for one in variants[name]
        ]
        count = len(configs) or {"opt": len(OPT)}[name]
        rows.append(f"| {architecture.models} | `{name}` | {_parts(configs)} | {count} |\n")
    table = _HEAD + "".join(sorted(rows, key=str.lower))
    return _TABLE.sub(lambda match: match[1] + table + match[2], page)


def _parts(configs: list[ModelConfig]) -> str:
    """In what any of these models differs from LLaMA."""
    found: dict[str, None] = {}
    for config in configs:
        if not isinstance(config, DecoderConfig):
            return "a model file of its own"
        found |= dict.fromkeys(part for part, has in _switches(config).items() if has)
    return ", ".join(found) or ("-" if configs else "a model file of its own")


def _switches(config: DecoderConfig) -> dict[str, bool]:
    windows, rotations = set(config.windows), set(config.rotary_of_layer)
    rotary = config.rotaries[0] if config.rotaries else None
    return {
        "biases of query, key and value": config.qkv_bias and not config.out_bias,
        "norms of queries and keys": config.qk_norm is not None,
        "layer norms": config.norm == "layer",
        "norms after the blocks": config.norms == NORMS_AFTER,
        "norms before and after the blocks": config.norms.count == 4,
        "one norm for both blocks": config.is_parallel and config.norms.count == 1,
        "both blocks side by side": config.is_parallel and config.norms.count == 2,
        "embedded positions in place of rotation": config.table_positions > 0,
        "sliding windows": windows != {None} and None not in windows,
        "sliding windows in some layers": len(windows) > 1,
        "layers without rotation": len(rotations) > 1 and None in rotations,
        "two rotations": len(rotations - {None}) > 1,
        "rotation of a part of each head": rotary is not None and rotary.dim < config.head_dim,
        "rotation of neighbours": config.rotates_neighbours,
        "queries that grow with their position": rotary is not None
        and rotary.query_growth is not None,
        "soft caps": bool(config.attention_soft_cap or config.logit_soft_cap),
        "attention sinks": config.has_sinks,
        "a feed-forward without gate": len(config.mlp) == 2,
        "a learned activation": config.activation == "xielu",
        "a mixture of experts": config.experts is not None,
        "a shared expert": bool(config.experts and config.experts.shared_size),
        "a router with biases": bool(config.experts and config.experts.has_choice_bias),
        "a router with a margin": bool(
            config.experts and config.experts.routing.margin is not None
        ),
        "some layers without experts": bool(config.dense_layers),
        "scaled embeddings": config.embedding_factor != 1.0,
        "scaled logits": config.logit_factor != 1.0,
        "scaled residuals": config.residual_factor != 1.0,
        "clipped queries, keys and values": config.clip_qkv is not None,
    }


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
