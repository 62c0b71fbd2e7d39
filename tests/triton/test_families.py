"""`fastserve serve` on a checkpoint of each family answers through Triton as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from byte_tokenizer import save_byte_tokenizer
from decoder_checkpoints import FAMILIES
from fastserve_backend.config import EngineConfig
from running_server import running_server
from serving_client import GrpcStream
from transformers import AutoModelForCausalLM

FIRST = ("qwen2", "gemma3")
"""The others start a server each with `make test-all`."""
PROMPTS = [[5, 250, 17, 99, 4, 33, 120, 8, 61, 7, 290, 11], [42]]
NUM_TOKENS = 24


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in FIRST else pytest.mark.repeated) for one in FAMILIES],
)
def test_streams_have_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    reference = AutoModelForCausalLM.from_config(FAMILIES[name].config(vocab_size=600)).eval()
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            is_norm = "norm" in parameter_name and parameter_name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.4)
    reference.save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    config = EngineConfig().with_keys(
        model=str(tmp_path),
        dtype="float32",
        device_blocks=40,
        swap_space_gib=0.01,
    )
    with running_server(config, tmp_path / "server.log") as server:
        streams = [
            GrpcStream(
                server.endpoints.grpc_url,
                input_ids=ids,
                stream=True,
                max_tokens=NUM_TOKENS,
                temperature=0.0,
                ignore_eos=True,
            )
            for ids in PROMPTS
        ]
        answers = [stream.finish().token_ids for stream in streams]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
        assert len(answer) == NUM_TOKENS
