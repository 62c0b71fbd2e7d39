"""Which tokens a request's ``allowed_token_ids`` and ``bad_words`` leave."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fastserve_backend import SamplingParams, StructuredOutput
from fastserve_backend.checkpoints.chat_template import Message
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer, Tokenizer
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.token_rules import TokenRules
from hypothesis import given
from hypothesis import strategies as st

MODEL = load_model_config("opt-125m", load_format="dummy")  # token 2 ends an answer
BYTES = ByteTokenizer(MODEL.vocab_size)  # token n + 4 is byte n


class Merges(Tokenizer):
    """Splits a text into the longest tokens of a list."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            longest = max((one for one in self.tokens if text.startswith(one)), key=len)
            ids.append(self.tokens.index(longest))
            text = text[len(longest) :]
        return ids

    def render_chat(self, messages: Sequence[Message]) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id].encode()


def rules(tokenizer: Tokenizer = BYTES, **options: Any) -> TokenRules:
    found = TokenRules.of(SamplingParams(**options), tokenizer, MODEL)
    assert found is not None
    return found


def allowed(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def test_most_requests_have_none() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop_token_ids=[7], min_tokens=2)
    assert TokenRules.of(params, BYTES, MODEL) is None


def test_allowed_tokens_are_bits_and_narrow_a_mask() -> None:
    last = MODEL.vocab_size - 1
    some = rules(allowed_token_ids=[5, last, 5, 64])
    assert some.allowed is not None
    assert len(some.allowed) == 4 * -(-MODEL.vocab_size // 32)
    assert allowed(some.allowed) == [5, 64, last]
    assert not some.depend_on_output
    mask = rules(allowed_token_ids=[4, 64, 65]).allowed
    assert mask is not None
    assert allowed(some.narrow(mask)) == [64]
    assert rules(bad_words="a").narrow(mask) == mask


@pytest.mark.parametrize(
    ("word", "output", "banned"),
    [
        ("b", [], {2}),  # " b" ends with "b"
        ("ab", [], set()),
        ("ab", [0], {3}),
        ("ab", [0, 3], set()),
        ("ab", [5], {3}),  # " a" "b"
        ("aba", [0], set()),
        ("aba", [3, 0, 3], {0}),
        ("  b", [], {2}),
        ("  ", [1], {1}),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_after_the_others(
    word: str, output: list[int], banned: set[int]
) -> None:
    class Spelled(Merges):
        def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
            assert not special_tokens
            known = {"b": [2], " b": [1, 2], "ab": [0, 3], " ab": [5, 3], "  ": [1, 1]}
            return known.get(text) or [{"a": 0, " ": 1, "b": 3}[letter] for letter in text]

    found = rules(Spelled([]), bad_words=[word])
    assert found.banned_after(array("i", output)) == banned
    assert found.depend_on_output == (word not in ("b", "  b"))


@given(data=st.data())
def test_whatever_the_vocabulary_no_bad_word_is_in_an_answer_as_it_is_tokenized(
    data: st.DataObject,
) -> None:
    more = data.draw(st.lists(st.text("ab ", min_size=2, max_size=4), max_size=8, unique=True))
    tokenizer = Merges(["a", "b", " ", *more])
    words = data.draw(
        st.lists(st.text("ab ", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=3)
    )
    found = rules(tokenizer, bad_words=words)
    output = array("i")
    for _ in range(12):
        free = sorted(set(range(len(tokenizer.tokens))) - found.banned_after(output))
        if not free:
            break
        output.append(data.draw(st.sampled_from(free)))
    ids = "".join(f"<{one}>" for one in output)
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            assert "".join(f"<{one}>" for one in tokenizer.encode(text)) not in ids


def test_what_is_left_before_and_after_min_tokens() -> None:
    found = rules(
        allowed_token_ids=[2, 4, 5, 9], min_tokens=2, max_tokens=5,
        stop_token_ids=[9], bad_words=["\1", "\0\0"],
    )  # fmt: skip
    mask = found.allowed
    assert mask is not None
    assert found.leave_choice(mask, array("i"))
    assert not found.leave_choice(mask, array("i", [4]))
    assert found.leave_choice(mask, array("i", [4, 4]))  # an end
    endless = replace(SamplingParams(allowed_token_ids=[2], min_tokens=1), ignore_eos=True)
    assert TokenRules.of(endless, BYTES, MODEL) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [2], "min_tokens": 1}, "got '1 token ids'; bad_words or min_tokens"),
        ({"allowed_token_ids": [2, 8], "min_tokens": 1, "stop_token_ids": 8}, "got '2 token ids'"),
        ({"allowed_token_ids": [69], "bad_words": ["A"]}, "ban all of them; allow another token"),
        (
            {"allowed_token_ids": [69], "structured_output": StructuredOutput(regex="A")},
            "with structured_output one of them must be an end token, such as 2",
        ),
    ],
)
def test_allowed_tokens_of_which_none_is_left(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^allowed_token_ids: .*{message}"):
        rules(**options)


def test_a_bad_word_without_tokens() -> None:
    class Silent(ByteTokenizer):
        def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(InvalidRequestError, match=r"^bad_words: got 'a'; must give at least one"):
        rules(Silent(MODEL.vocab_size), bad_words="a")
