"""Forms of checkpoints that transformers does not write but reads, and models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checkpoints import FAMILIES
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import load_model_config
from paged_executor import check_prompt, load
from rotary_checkpoints import random_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel


def saved(name: str, directory: Path) -> PreTrainedModel:
    theirs = random_model(FAMILIES[name].config())
    theirs.save_pretrained(directory)
    return theirs


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Names without "transformer.", and masks beside the weights."""
    theirs = saved("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): one for name, one in load_file(file).items()}
    mask = torch.ones(1, 1, 48, 48)
    save_file(tensors | {"h.0.attn.bias": mask, "h.1.attn.masked_bias": torch.ones(1)}, file)
    check_prompt(load(tmp_path), theirs, 40)


def test_layers_that_predict_more_tokens_are_skipped(tmp_path: Path) -> None:
    theirs = saved("glm4_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    of_last = {name: one for name, one in tensors.items() if ".layers.2." in name}
    for number, is_known in ((3, True), (4, False)):
        more = {name.replace(".2.", f".{number}.", 1): one.clone() for name, one in of_last.items()}
        save_file(
            tensors | more | {f"model.layers.{number}.eh_proj.weight": torch.ones(2, 2)}, file
        )
        if is_known:
            check_prompt(load(tmp_path), theirs, 20)
        else:
            with pytest.raises(ModelError, match=r"layers\.4\..* is unexpected"):
                load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("bloom", {}, "model_type is 'bloom', expected another: .* bias for distances"),
        ("mpt", {}, "model_type is 'mpt', expected another: .* bias for distances"),
        ("bitnet", {}, "model_type is 'bitnet', expected another: .* 8 bits"),
        ("falcon", {"alibi": True}, "alibi is True, expected false"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, expected 1"),
        ("gpt2", {"n_head": 7}, "n_embd is 32, expected a multiple of num_attention_heads, 7"),
        ("gpt2", {"n_embd": "wide"}, "n_embd is 'wide', expected an integer of at least 1"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True, expected false"),
        ("codegen", {"n_head": 2}, "num_attention_heads is .*, expected a multiple of 4"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings is True, expected false"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act is 'silu', expected one of xielu"),
        ("internlm3", {"qkv_bias": False}, "mlp_bias is True, expected the same"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, expected 2"),
        ("glm4_moe", {"n_group": 3}, "n_group is 3, expected a divisor of the 8 experts"),
        ("glm4_moe", {"topk_group": 5}, "topk_group is 5, expected as many of the 4 groups"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True, expected false"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 2]}, "moe_topk is .*, expected one number"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected one of"),
    ],
)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, model_type: str, fields: dict[str, Any], message: str
) -> None:
    known = FAMILIES[model_type].config().to_dict() if model_type in FAMILIES else {}
    fields = known | {"model_type": model_type} | fields
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        load_model_config(str(tmp_path), load_format="dummy")
