"""Reads tekken.json, the tokenizer of Mistral's models since Nemo, as a tokenizer.json.

It lists the bytes of each token in order of rank, as tiktoken's vocabularies do. Special tokens
have the first ids, so the id of another token is its rank plus their number (mistral-common).
"""

from __future__ import annotations

import json
from base64 import b64decode
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from fastserve_backend.checkpoints.limits import TOKEN_CHARS, VOCABULARY_CHARS, check
from fastserve_backend.checkpoints.token_ids import around_prompt
from fastserve_backend.checkpoints.token_text import byte_level

TEKKEN_FILE = "tekken.json"
TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Which of its special tokens have a role, as tokenizer_config.json names it."""
# Of files without a list, which are older than version 7.
_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]"),
    "[SUFFIX]",
)


def tekken_as_json(path: Path) -> str:
    """The content of the tokenizer.json that says the same. Raises any error if it is damaged."""
    fields = json.loads(path.read_text("utf-8"))
    settings = fields["config"]
    num_special = int(settings["default_num_special_tokens"])
    num_pieces = int(settings["default_vocab_size"]) - num_special
    pieces = [b64decode(one["token_bytes"]) for one in islice(fields["vocab"], num_pieces)]
    _check_sizes(pieces)
    special = _special_tokens(fields, num_special)
    vocabulary = {byte_level(piece): num_special + rank for rank, piece in enumerate(pieces)}
    vocabulary |= {token: number for number, token in enumerate(special)}
    fast = FastTokenizer(models.BPE(vocabulary, _merges(pieces), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(settings["pattern"]), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    fast.post_processor = around_prompt(fast, TEKKEN_NAMES["bos_token"], None)
    text: str = fast.to_str()
    return text


def _special_tokens(fields: dict[str, Any], count: int) -> list[str]:
    """All special tokens. Those that the file does not name have names of their own."""
    listed = fields.get("special_tokens")
    names = {one["rank"]: one["token_str"] for one in listed or ()}
    if not listed:
        names = dict(enumerate(_SPECIAL))
    return [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def _merges(pieces: list[bytes]) -> list[tuple[str, str]]:
    """All ways to merge two tokens into a third, the lowest rank first: tiktoken merges the pair
    whose bytes are the token of the lowest rank."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        found = [(a, b) for a, b in halves if a in ranks and b in ranks]
        found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(byte_level(a), byte_level(b)) for a, b in found]
    return merges


def _check_sizes(pieces: list[bytes]) -> None:
    check("the number of bytes of all tokens", sum(map(len, pieces)), VOCABULARY_CHARS)
    longest = max(map(len, pieces), default=0)
    check("the number of bytes of a token", longest, TOKEN_CHARS)
