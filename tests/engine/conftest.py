"""A small random OPT checkpoint, and engines with real ranks that serve it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from byte_tokenizer import save_byte_tokenizer
from fastserve_backend import LLM
from fastserve_kernels.cpu import builder
from live_engine import wait_until_free
from small_model import EOS_TOKEN_IDS, MAX_MODEL_LEN, VOCAB_SIZE
from transformers import OPTConfig, OPTForCausalLM


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights differ so much that rounding never decides a greedy token."""
    directory = tmp_path_factory.mktemp("opt")
    config = OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=3,
        ffn_dim=128,
        num_attention_heads=4,
        max_position_embeddings=MAX_MODEL_LEN,
        word_embed_proj_dim=64,
        eos_token_id=list(EOS_TOKEN_IDS),
    )
    torch.manual_seed(11)
    model = OPTForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Strong positions, so that greedy answers do not settle on one token.
            spread = 0.8 if "embed_positions" in name else 0.3
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, spread)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> OPTForCausalLM:
    return OPTForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def llm(checkpoint: Path, tokenizer: Path) -> Iterator[LLM]:
    """An engine that most tests share. It has memory for all jobs, and runs ten at once."""
    with LLM(
        str(checkpoint),
        tokenizer=str(tokenizer),
        max_num_seqs=10,
        device_blocks=600,
        swap_space_gib=0.02,  # each block makes checking the tables slower
        check_integrity=True,
    ) as shared:
        yield shared
        wait_until_free(shared)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of profiles in a cache that holds only the compiled kernels."""
    (tmp_path / "fastserve").mkdir()
    (tmp_path / "fastserve" / "kernels").symlink_to(builder.cache_dir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fastserve" / "profiles"
