"""An answer ends at every token that any file names as an end, whatever the other files say."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.checkpoints.configured_model import load_model_and_tokenizer
from fastserve_backend.checkpoints.end_tokens import TURN_ENDS
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.config import EngineConfig
from gguf_files import (
    END,
    END_OF_TURN,
    Arrays,
    Fields,
    random_llama,
    with_tokenizer_fields,
    write_llama,
)
from gguf_files import VOCAB_SIZE as GGUF_SIZE
from tokenizer_files import write_json
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

pytestmark = pytest.mark.usefixtures("conversions_anywhere")

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB_SIZE = 300
# Special tokens whose names mean nothing, and the id of the first.
NAMES = ["<a>", "<b>", "<c>", "<d>", "<e>"]
A, B, C, D, E = range(256, 261)
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}"


def write(
    directory: Path,
    config: dict[str, Any] | None = None,
    *,
    generation: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    special_tokens_map: dict[str, Any] | None = None,
    added: list[AddedToken] | None = None,
    behind_prompt: str = "",
) -> Path:
    """Writes a model's directory. `added` are tokens after NAMES, from id 261 on."""
    vocab = {letter: token_id for token_id, letter in enumerate(ALPHABET)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(NAMES)
    fast.add_tokens(added or [])
    if behind_prompt:
        token_id = fast.token_to_id(behind_prompt)
        fast.post_processor = TemplateProcessing(
            single=f"<a> $A {behind_prompt}", special_tokens=[("<a>", A), (behind_prompt, token_id)]
        )
    fast.save(str(directory / "tokenizer.json"))
    model = {"model_type": "opt", "vocab_size": VOCAB_SIZE}
    write_json(directory, "config.json", model | (config or {}))
    if generation is not None:
        write_json(directory, "generation_config.json", generation)
    if settings is not None:
        write_json(directory, "tokenizer_config.json", settings)
    if special_tokens_map is not None:
        write_json(directory, "special_tokens_map.json", special_tokens_map)
    return directory


def ends(directory: Path, **keys: Any) -> set[int]:
    keys = {"model": str(directory), "load_format": "dummy", **keys}
    config, _ = load_model_and_tokenizer(EngineConfig().with_keys(**keys))
    return set(config.eos_token_ids)


def eos(value: Any) -> dict[str, Any]:
    return {"eos_token_id": value}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (eos(A), eos(B), {A, B}),
        (eos([A, B]), eos([B, C]), {A, B, C}),
        (eos(A), eos(None), {A}),
        (eos(A), {}, {A}),
        (eos(A), eos(-1), {A}),
        (eos(A), eos([]), {A}),
        (eos(None), eos(B), {B}),
        ({}, eos([B]), {B}),
        (eos(-1), None, set()),
        ({}, None, {2}),  # the architecture's default
        (eos([A, VOCAB_SIZE]), None, {A}),
    ],
)
def test_configurations(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: set[int]
) -> None:
    assert ends(write(tmp_path, config, generation=generation)) == expected


@pytest.mark.parametrize("config", [eos(A), eos(None), {}])
@pytest.mark.parametrize(
    "files",
    [
        {"settings": {"eos_token": "<c>"}},
        {"settings": {"eos_token": {"content": "<c>", "lstrip": False, "special": True}}},
        {"settings": {"eos_token": "<c>"}, "special_tokens_map": {"eos_token": None}},
        {"special_tokens_map": {"eos_token": "<c>"}},
        {"settings": {"eos_token": None}, "special_tokens_map": {"eos_token": "<c>"}},
        # Fields without which the second file does not count.
        {
            "settings": {"added_tokens_decoder": {}},
            "special_tokens_map": {"eos_token": {"content": "<c>"}},
        },
        {"settings": {"eot_token": "<c>"}},
        {"settings": {"extra_special_tokens": {"eom_token": "<c>"}}},
        {"behind_prompt": "<c>"},
        {"settings": {"chat_template": CHAT + "<c>\n{% endfor %}"}},
    ],
)
def test_a_tokenizer_names_one(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any]
) -> None:
    """The architecture's default, 2, is a letter here and ends nothing."""
    named = {A} if config.get("eos_token_id") else set()
    assert ends(write(tmp_path, config, **files)) == named | {C}


def test_both_tokens_of_a_tokenizers_files(tmp_path: Path) -> None:
    settings, others = {"eos_token": "<c>"}, {"eos_token": "<d>"}
    directory = write(tmp_path, eos(A), settings=settings, special_tokens_map=others)
    assert ends(directory) == {A, C, D}


def test_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", settings={"eos_token": "<d>"})
    model = write(tmp_path, eos(A), settings={"eos_token": "<c>"})
    assert ends(model, tokenizer=str(other)) == {A, D}


@pytest.mark.parametrize("name", ["</s>", "<|endoftext|>", "<|eot_id|>", "<|im_end|>"])
@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_known_names(tmp_path: Path, name: str, special: bool) -> None:
    """Known names end an answer only if the token is special, since "</s>" may be text."""
    added = [AddedToken(name, special=special, normalized=False)]
    expected = {A, E + 1} if special or name in TURN_ENDS else {A}
    assert ends(write(tmp_path, eos(A), added=added)) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT + "<c>\n{% endfor %}", {C}),
        (CHAT + " \n<c><d>{% endfor %}", {C}),
        (CHAT + "{{ eos_token }}{% endfor %}", {B}),
        (CHAT + "{% if m.role == 'assistant' %}<d>{% endif %}<e>{% endfor %}", {D}),
        # After an answer that is not the last.
        (CHAT + "{% if not loop.last %}<c>{% endif %}{% endfor %}", {C}),
        # The template writes a closing tag as text, then the end token.
        (CHAT + "</answer><c>{% endfor %}", {C}),
        (CHAT + "<|turn end|>{% endfor %}", {E + 2}),
        # The token comes before the answer, or there is none.
        ("{% for m in messages %}<c>{{ m.role }}<d>{{ m.content }}{% endfor %}", {C}),
        (CHAT + "\n\n{% endfor %}", set()),
        (CHAT + ", User: <c>{% endfor %}", set()),
        ("{{ messages[-1].content }}", set()),
        ("{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}", set()),
        ("no message at all <c>", set()),
        ("{{ messages[0].content.missing.field }}", set()),
    ],
)
def test_turn_ends_of_chat_templates(tmp_path: Path, template: str, expected: set[int]) -> None:
    settings = {"chat_template": template, "eos_token": "<b>"}
    added = [AddedToken("</answer>", normalized=False), AddedToken("<|turn end|>")]
    directory = write(tmp_path, eos(A), settings=settings, added=added)
    assert ends(directory) == {A, B} | expected


def test_turn_ends_where_special_tokens_in_a_text_are_none(tmp_path: Path) -> None:
    settings = {"chat_template": CHAT + "<c>{% endfor %}", "split_special_tokens": True}
    assert ends(write(tmp_path, eos(A), settings=settings)) == {A, C}


def test_they_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ends(write(tmp_path, eos(A), settings={"eos_token": "<c>"}))
    assert f"an answer ends at token {A} '<a>', {C} '<c>'" in caplog.messages


def test_none_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends(write(tmp_path, eos(None)))
    assert "no file names an end token" in caplog.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {END, END_OF_TURN}),
        ({"eos": 40, "eot": 41, "eom": 42}, {40, 41, 42}),
        ({"eos": None, "eot": 41, "eom": None}, {41}),
        ({"eos": 40, "eot": None, "eom": None}, {40}),
        ({"eos": 2**32 - 1, "eot": 41}, {41}),
        ({"eos": None, "eot": None, "eom": 42}, {42}),
        ({"eos": None, "eot": None, "eom": None}, set()),
    ],
)
def test_gguf(tmp_path: Path, fields: dict[str, int | None], expected: set[int]) -> None:
    """Known names end an answer in addition to the tokens in the fields."""
    change = with_tokenizer_fields({f"{name}_token_id": value for name, value in fields.items()})
    convert(write_llama(tmp_path / "m.gguf", random_llama(), change=change), tmp_path / "out")
    assert ends(tmp_path / "out") == expected | {END, END_OF_TURN}


def test_gguf_under_two_ids(tmp_path: Path) -> None:
    def change(given: Fields, arrays: Arrays) -> None:
        given["tokenizer.ggml.tokens"] += ["<stop>", "<stop>"]
        given["tokenizer.ggml.token_type"] += [3, 3]
        given["tokenizer.ggml.eos_token_id"] = GGUF_SIZE

    model = random_llama(vocab_size=GGUF_SIZE + 2)
    convert(write_llama(tmp_path / "m.gguf", model, change=change), tmp_path / "out")
    assert {GGUF_SIZE, GGUF_SIZE + 1} <= ends(tmp_path / "out")


def test_those_of_random_weights_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_model_and_tokenizer(
            EngineConfig().with_keys(model="opt-125m", load_format="dummy", dtype="float32")
        )
    assert "an answer ends at token 2 '</s>'" in caplog.messages
