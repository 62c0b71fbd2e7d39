"""Bad prompts are refused before they cost time or memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer
from fastserve_backend.engine.request_checks import RequestChecks
from fastserve_backend.errors import ContextLengthError, InvalidRequestError
from fastserve_backend.sampling_params import SamplingParams
from tokenizers import Tokenizer, decoders, models

MODEL = load_model_config("opt-125m", load_format="dummy", max_model_len=1000)


class CountingTokenizer(ByteTokenizer):
    """A tokenizer whose tokens have ``width`` bytes. It counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__(MODEL.vocab_size)
        self.max_token_bytes = 64
        self.width = width
        self.num_chars = 0

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return [7] * (len(text) // self.width)


def checks(tokenizer: ByteTokenizer, kv_capacity: int = 10_000) -> RequestChecks:
    return RequestChecks(MODEL, tokenizer, lambda: kv_capacity)


def test_of_a_hopelessly_long_text_only_the_beginning_is_tokenized() -> None:
    tokenizer = CountingTokenizer(width=4)
    with pytest.raises(InvalidRequestError, match=r"text_input: got '60000 characters'"):
        checks(tokenizer).encode("a" * 60_000)
    assert tokenizer.num_chars <= 8 * 1000


def test_a_text_of_long_tokens_is_tokenized_whole() -> None:
    tokenizer = CountingTokenizer(width=40)
    assert len(checks(tokenizer).encode("a" * 30_000)) == 750


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, -1], "input_ids: got -1; token ids are 0 to"),
        ([MODEL.vocab_size, 5], f"input_ids: got {MODEL.vocab_size}; token ids are 0 to"),
        (
            [5] * 1000,
            "input_ids: got '1000 tokens'; This model's maximum context length is 1000 tokens, "
            "so a prompt has at most 999$",
        ),
    ],
)
def test_token_ids_are_refused_before_they_are_decoded(ids: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        checks(ByteTokenizer(MODEL.vocab_size)).accept_ids(np.array(ids, np.int32))


@pytest.mark.parametrize("width", [1, 4, 40])
def test_of_a_truncated_text_the_last_tokens_are_used(width: int) -> None:
    tokenizer = CountingTokenizer(width)
    fits = checks(tokenizer)
    for kept in (1, 900):
        assert len(fits.encode("a" * 4_000_000, kept)) == kept
    assert tokenizer.num_chars < 200_000  # of eight million


def test_truncated_prompts_are_the_ends_of_whole_ones() -> None:
    accepting = checks(ByteTokenizer(MODEL.vocab_size))
    assert (
        accepting.encode("abc", 2) == accepting.encode("abc")[-2:] == [4 + ord("b"), 4 + ord("c")]
    )
    assert accepting.encode("abc", 4) == accepting.encode("abc")
    ids = np.arange(2000, dtype=np.int32) - 1000  # what is cut off may be anything
    assert accepting.accept_ids(ids, 3) == [997, 998, 999]


def test_how_many_tokens_are_kept() -> None:
    accepting = checks(ByteTokenizer(MODEL.vocab_size))
    params = SamplingParams(max_tokens=100)
    assert accepting.kept_tokens(None, params) is None
    assert accepting.kept_tokens(999, params) == 999
    assert accepting.kept_tokens(1000, params) is None  # then a longer prompt is too long anyway
    assert accepting.kept_tokens(-1, params) == 900
    assert accepting.kept_tokens(-1, params, clips=True) == 999
    assert accepting.kept_tokens(-1, SamplingParams(max_tokens=5000)) == 1
    for wrong in (0, -2, True, 1.5, "5"):
        with pytest.raises(InvalidRequestError, match=r"^truncate_prompt_tokens: got "):
            accepting.kept_tokens(wrong, params)  # type: ignore[arg-type]


def test_token_ids_that_fit() -> None:
    ids = [5] * 999
    assert checks(ByteTokenizer(MODEL.vocab_size)).accept_ids(np.array(ids, np.int32)) == ids


def test_a_token_that_the_model_lacks_is_blamed_on_what_was_sent(tmp_path: Path) -> None:
    """The token may come from a chat template, in a tokenizer with more tokens than the model."""
    fast = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|im_start|>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("<|im_start|>{{ messages[0].content }}")
    model = replace(MODEL, vocab_size=2)
    refusing = RequestChecks(model, HFTokenizer(tmp_path, 2), lambda: 10_000)
    assert refusing.encode("ab") == [0, 1]
    token = r"the prompt has the token '<\|im_start\|>' \(2\), but the model's vocabulary has 2 ids"
    with pytest.raises(InvalidRequestError, match=rf"^messages: got '1 messages'; {token}$"):
        refusing.encode_chat([{"role": "user", "content": "ab"}])
    with pytest.raises(InvalidRequestError, match=rf"^text_input: got 'a<\|im_start\|>'; {token}$"):
        refusing.encode("a<|im_start|>")


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "kv_capacity", "message"),
    [
        (990, 11, 1000, "max_tokens: got 11; LIMIT 1000 tokens, and the prompt has 990, "
         "so at most 10"),
        (1000, 1, 1000, "text_input: got '1000 tokens'; LIMIT 1000 tokens, "
         "so a prompt has at most 999"),
        (790, 11, 800, "max_tokens: got 11; LIMIT 800 tokens, all that the KV cache holds, "
         "and the prompt has 790, so at most 10"),
        (800, 1, 800, "text_input: got '800 tokens'; LIMIT 800 tokens, "
         "all that the KV cache holds, so a prompt has at most 799"),
    ],
)  # fmt: skip
def test_what_context_and_kv_cache_have_no_room_for(
    num_tokens: int, max_tokens: int, kv_capacity: int, message: str
) -> None:
    refusing = checks(ByteTokenizer(MODEL.vocab_size), kv_capacity)
    with pytest.raises(ContextLengthError) as refused:
        refusing.validate([5] * num_tokens, SamplingParams(max_tokens=max_tokens))
    assert str(refused.value) == message.replace("LIMIT", "This model's maximum context length is")


def test_what_just_fits() -> None:
    for limit in (800, 1000):
        fits = checks(ByteTokenizer(MODEL.vocab_size), limit)
        fits.validate([5] * (limit - 10), SamplingParams(max_tokens=10))


def test_of_too_many_messages_none_is_looked_at() -> None:
    """Reading hundreds of thousands would block other requests for seconds."""
    refusing = checks(ByteTokenizer(MODEL.vocab_size))
    with pytest.raises(ContextLengthError, match=r"^messages: got '1000 messages'; "):
        refusing.encode_chat([{"no": "message"}] * 1000)
    with pytest.raises(InvalidRequestError, match=r"^messages\[0\]: got 'no'; "):
        refusing.encode_chat([{"no": "message"}] * 999)
