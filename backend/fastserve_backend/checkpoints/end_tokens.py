"""The tokens that end an answer: all end tokens that any of a model's files names.

Authors correct one of the files and leave the others, so no file alone is right. After a token that
ends something according to any file, a model does not go on sensibly.
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
"""Tokens with these names end a turn, in every vocabulary that has them but that of gpt-oss."""

# gpt-oss ends an answer with one of these. Its <|end|> only ends a message of the answer, such as
# the reasoning, and the next message follows.
_HARMONY_ENDS = ("<|return|>", "<|call|>")

# Special tokens with these names end a text.
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
    """The ids that end an answer, according to the files of the model and of its tokenizer.

    The architecture's default counts only if no file names any: in other vocabularies its id may
    be a word.
    """
    of_config = config.eos_token_ids
    if config.eos_is_default and tokenizer.end_token_ids:
        of_config = ()
    ids = dict.fromkeys((*of_config, *tokenizer.end_token_ids))
    return tuple(token_id for token_id in ids if token_id < config.vocab_size)


def named_turn_ends(tokens: set[str]) -> tuple[str, ...]:
    """Those of a vocabulary's tokens that end a turn, by their names."""
    if tokens.issuperset(_HARMONY_ENDS):
        return _HARMONY_ENDS
    return tuple(name for name in TURN_ENDS if name in tokens)


def tokenizer_ends(
    fast: FastTokenizer,
    added: Mapping[int, AddedToken],
    named: Sequence[str],
    template: ChatTemplate | None,
) -> list[int]:
    """The ids that end an answer, according to the files of a tokenizer.

    Args:
        added: the tokenizer's added tokens, by id.
        named: the tokens that its configuration calls end-of-sequence.
    """
    texts = list(named)
    prompt, text = (fast.encode("a", add_special_tokens=around).ids for around in (True, False))
    if prompt[-1:] != text[-1:]:  # the tokenizer ends a prompt with a token
        texts += [added[token_id].content for token_id in prompt[-1:] if token_id in added]
    of_names = named_turn_ends({token.content for token in added.values()})
    if template is not None and of_names != _HARMONY_ENDS:
        texts += _turn_ends(template, list(added.values()))
    texts += of_names
    texts += [t.content for t in added.values() if t.special and t.content in _TEXT_ENDS]
    ids = [token_id for text in texts if (token_id := fast.token_to_id(text)) is not None]
    # A token may have a second id.
    ids += [token_id for token_id, token in added.items() if token.content in texts]
    return list(dict.fromkeys(ids))


def _turn_ends(template: ChatTemplate, added: list[AddedToken]) -> Iterator[str]:
    """The token that a template writes after an answer: of several, the first special one.

    If no token follows the last answer, a special one between it and the next turn ends it.
    """
    first = list(_beginning(template.text_after_answer(is_last=True), added))
    special = [token for token in first if token.special]
    if not first:
        between = _beginning(template.text_after_answer(is_last=False), added)
        special = [token for token in between if token.special]
    yield from (token.content for token in (special or first)[:1])


def _beginning(text: str, added: list[AddedToken]) -> Iterator[AddedToken]:
    """The added tokens that `text` begins with."""
    text = text.lstrip()
    while matching := [one for one in added if one.content and text.startswith(one.content)]:
        longest = max(matching, key=lambda one: len(one.content))
        yield longest
        text = text[len(longest.content) :].lstrip()
