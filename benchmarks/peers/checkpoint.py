"""A checkpoint of OPT-125M's shape that needs no download: seeded random weights and a tokenizer.

A token's time depends on shapes and lengths, not on the values of the weights. So random weights
will do where prompts are token ids and lengths of answers are forced. Both servers read the same
files.
"""

from __future__ import annotations

import itertools
import string
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

SEED = 1
VOCAB_SIZE = 50272
SPECIAL = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}

OPT_125M = OPTConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=768,
    word_embed_proj_dim=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    ffn_dim=3072,
    max_position_embeddings=2048,
    do_layer_norm_before=True,
    # With the usual 0.02, logits differ so little that rounding decides which token is the best,
    # and the outputs of two servers cannot be compared.
    init_std=0.08,
)


def save_tokenizer(directory: Path) -> None:
    """Byte-level BPE with a text for every id, so that turning ids into text is real work too."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (
        "Ġ" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4)
    )
    texts = [*SPECIAL, *symbols]
    texts += itertools.islice(words, VOCAB_SIZE - len(texts))
    tokenizer = Tokenizer(
        models.BPE({text: number for number, text in enumerate(texts)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="</s>",  # as OPT has it
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(directory)


def existing_checkpoint(cache: Path) -> Path:
    """The checkpoint's directory in ``cache``; writes it, 250 MB in bfloat16, if it is missing."""
    directory = cache / f"opt-125m-random-{SEED}"
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Written elsewhere and renamed, so that an interrupted write is not taken for a checkpoint.
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            written = Path(unfinished) / "checkpoint"
            torch.manual_seed(SEED)
            OPTForCausalLM(OPT_125M).bfloat16().save_pretrained(written)
            save_tokenizer(written)
            written.rename(directory)
    return directory
