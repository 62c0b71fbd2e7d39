"""Which tokens end an answer: all that any of a model's files names.

Authors correct one of these files and leave the others, so that none of them alone is right. A
model does not go on sensibly behind a token that ends something in any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fastserve_backend.checkpoints.chat_template import ChatTemplate
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as FastTokenizer

TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|EOT|>",
    "<EOT>",
    "▁<EOT>",
)
"""Tokens of these names end a turn in every vocabulary that has them."""

# And special ones of these names a text.
_TEXT_ENDS = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<｜end▁of▁sentence｜>",
)


def end_tokens(config: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an answer, by the files of the model and of its tokenizer.

    An architecture's usual one counts only where no file names any: other vocabularies have a word
    at its place.
    """
    of_config = config.eos_token_ids
    if config.eos_is_default and tokenizer.end_token_ids:
        of_config = ()
    ids = dict.fromkeys((*of_config, *tokenizer.end_token_ids))
    return tuple(token_id for token_id in ids if token_id < config.vocab_size)


def tokenizer_ends(
    fast: FastTokenizer,
    added: Mapping[int, AddedToken],
    named: Sequence[str],
    template: ChatTemplate | None,
) -> list[int]:
    """The ids that end an answer, by the files of a tokenizer.

    Args:
        added: its added tokens, by id.
        named: the tokens that its configuration calls end-of-sequence.
    """
    texts = list(named)
    prompt, text = (fast.encode("a", add_special_tokens=around).ids for around in (True, False))
    if prompt[-1:] != text[-1:]:  # put behind a prompt
        texts += [added[token_id].content for token_id in prompt[-1:] if token_id in added]
    if template is not None:
        texts += _turn_ends(template, list(added.values()))
    texts += [
        token.content
        for token in added.values()
        if token.content in TURN_ENDS or (token.special and token.content in _TEXT_ENDS)
    ]
    ids = [token_id for text in texts if (token_id := fast.token_to_id(text)) is not None]
    # Also where a token has a second id.
    ids += [token_id for token_id, token in added.items() if token.content in texts]
    return list(dict.fromkeys(ids))


def _turn_ends(template: ChatTemplate, added: list[AddedToken]) -> Iterator[str]:
    """The token that a template writes behind an answer: the first special one of several.

    Where nothing follows the last answer, special tokens between it and the next turn end one.
    """
    first = list(_beginning(template.behind_answer(is_last=True), added))
    special = [token for token in first if token.special]
    if not first:
        between = _beginning(template.behind_answer(is_last=False), added)
        special = [token for token in between if token.special]
    yield from (token.content for token in (special or first)[:1])


def _beginning(text: str, added: list[AddedToken]) -> Iterator[AddedToken]:
    """The added tokens that `text` begins with."""
    text = text.lstrip()
    while matching := [one for one in added if one.content and text.startswith(one.content)]:
        longest = max(matching, key=lambda one: len(one.content))
        yield longest
        text = text[len(longest.content) :].lstrip()
