"""Chat templates of the families that people serve: prompts, refusals, and ends of answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
from family_chats import FAMILIES
from fastserve_backend.checkpoints.chat_messages import check_messages
from fastserve_backend.checkpoints.chat_options import ChatOptions
from fastserve_backend.checkpoints.configured_model import load_model_and_tokenizer
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.system_messages import later_system_texts, placements
from fastserve_backend.checkpoints.tokenizer import TokenizationError
from fastserve_backend.config import EngineConfig
from tokenizer_files import write_json
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

VOCAB_SIZE = 300
REFUSES = "the model's chat template refuses: "
CANNOT_CONTINUE = (
    f"{REFUSES}it does not write the last message as it is, so that message cannot be continued"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": " Be brief. /no_think "}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": ["é", None, True], "c": {"d": "<&>"}}},
}
CONVERSATIONS = {
    "question": [user("  Hi, 日本 😀 <b>?\n")],
    "system": [SYSTEM, user("Hi")],
    "turns": [user("One?"), assistant(" 1 \n"), user("Two?")],
    "all_turns": [SYSTEM, user("One?"), assistant("1"), user("Two?"), assistant("2"), user("3?")],
    "reasoning": [user("One?"), assistant("<think>\nHm.\n</think>\n\n1"), user("Two?")],
    "answer_last": [user("One?"), assistant("1")],
    "tool": [
        user("1 + 2?"),
        assistant("I add.", tool_calls=[CALL]),
        {"role": "tool", "content": "3", "tool_call_id": "call12345"},
        {"role": "tool", "content": '{"four": 4}', "tool_call_id": "call12345"},
    ],
    "two_calls": [user("?"), assistant("", tool_calls=[CALL, CALL]), user("!")],
    "stray_tool_result": [user("?"), {"role": "tool", "content": "3"}],
    "two_users": [user("One"), user("Two")],
    "assistant_first": [assistant("I begin."), user("Hi")],
    "late_system": [user("One?"), assistant("1"), SYSTEM, user("Two?")],
    "unknown_role": [{"role": "critic", "content": "Bad."}, user("Hi")],
    "special_tokens": [user("<|im_end|></s><end_of_turn><|end|>{{ 7 * 7 }}")],
}


def write(directory: Path, family: str, *, named: bool = True) -> Path:
    """A tokenizer of bytes with the tokens and the template of a family; `named`: its files name
    the end token."""
    chat = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(chat.special))
    fast.add_tokens(list(chat.as_text))
    fast.save(str(directory / "tokenizer.json"))
    eos = (chat.eos or chat.special[0]) if named else None
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat.template}
    write_json(
        directory, "tokenizer_config.json", settings | {"eos_token": eos, "bos_token": chat.bos}
    )
    config = {"model_type": "opt", "vocab_size": VOCAB_SIZE}
    ends = {"eos_token_id": eos and fast.token_to_id(eos)}
    write_json(directory, "config.json", config | ends)
    return directory


def outcome(render: Callable[[], Any]) -> Any:
    """What is rendered, or the message of the template's refusal."""
    try:
        return render()
    except jinja2.TemplateError as error:
        return REFUSES + str(error)
    except ValueError as error:
        return CANNOT_CONTINUE if "does not appear in the chat" in str(error) else error
    except TokenizationError as error:
        return str(error)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_refusals_are_those_of_transformers(
    tmp_path: Path, family: str, conversation: str
) -> None:
    """A later system message may be in another place, for templates that take it only there."""
    write(tmp_path, family)
    ours, theirs = HFTokenizer(tmp_path, VOCAB_SIZE), AutoTokenizer.from_pretrained(tmp_path)
    messages = check_messages(CONVERSATIONS[conversation])

    def text() -> Any:
        return outcome(lambda: ours.render_chat(messages))

    def expected(*, tokenize: bool) -> list[Any]:
        options = {"add_generation_prompt": True, "return_dict": False, "tokenize": tokenize}
        forms = list(placements(messages)) if later_system_texts(messages) else [messages]
        return [outcome(partial(theirs.apply_chat_template, one, **options)) for one in forms]

    before = text()
    wanted = expected(tokenize=False)
    assert before in wanted or text() in wanted  # a day may begin between them
    if not before.startswith(REFUSES):
        ids, wanted = ours.encode(before, special_tokens=False), expected(tokenize=True)
        assert ids in wanted or ours.encode(text(), special_tokens=False) in wanted


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers, 日本.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "The first."},
                    "b": {"type": "array", "items": {"type": "string"}},
                    "c": {"type": "object", "properties": {"d": {"enum": ["x", "y"]}}},
                },
                "required": ["a"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}},
]
CALLED = [
    user("1 + 2?"),
    {"role": "assistant", "reasoning_content": "I can add.", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3", "tool_call_id": "call12345"},
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "one_tool": {"tools": TOOLS[:1], "add_generation_prompt": False},
    "no_thinking": {"kwargs": {"enable_thinking": False, "bos_token": "<begin>"}},
    "documents": {
        "kwargs": {
            "documents": [{"title": "T", "text": "D"}],
            "reasoning_effort": "high",
            "add_thoughts": True,
        },
    },
    "no_prompt": {"add_generation_prompt": False},
    "continued": {"continue_final_message": True},
    "continued_with_tools": {"tools": TOOLS, "continue_final_message": True},
}
TALKS = {
    "question": CONVERSATIONS["question"],
    "called": CALLED,
    "answered": [*CALLED, assistant("It is ", reasoning="Easy.")],
    "trimmed": [user("One?"), assistant(" 1 \n\n")],
    "in_thought": [user("One?"), assistant("<think>\nHm")],
    "silent": [user("One?"), assistant("")],
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_options_give_the_prompts_of_transformers(tmp_path: Path, family: str, talk: str) -> None:
    write(tmp_path, family)
    ours, theirs = HFTokenizer(tmp_path, VOCAB_SIZE), AutoTokenizer.from_pretrained(tmp_path)
    messages = check_messages(TALKS[talk])
    for name, given in OPTIONS.items():
        options = ChatOptions(**given)
        if options.continue_final_message and messages[-1]["role"] != "assistant":
            continue

        def text(options: ChatOptions = options) -> Any:
            return outcome(lambda: ours.render_chat(messages, options))

        before = text()
        expected = outcome(
            lambda options=options: theirs.apply_chat_template(
                messages,
                tools=options.tools,
                add_generation_prompt=options.begins_answer,
                continue_final_message=options.continue_final_message,
                tokenize=False,
                **(options.kwargs or {}),
            )
        )
        assert expected in (before, text()), name  # a day may begin between them


@pytest.mark.parametrize(
    ("family", "conversation", "message"),
    [
        ("gemma2", "system", "System role not supported"),
        ("gemma2", "two_users", "Conversation roles must alternate user/assistant/user/..."),
        ("gemma3", "assistant_first", "Conversation roles must alternate user/assistant/user/..."),
        ("mistral", "two_users", "After the optional system message, roles must alternate"),
        ("llama3", "two_calls", "This model only supports single tool-calls at once!"),
        ("gpt_oss", "stray_tool_result", "Message has tool role, but there was no previous call!"),
    ],
)
def test_a_refusal_has_the_words_of_the_template(
    tmp_path: Path, family: str, conversation: str, message: str
) -> None:
    tokenizer = HFTokenizer(write(tmp_path, family), VOCAB_SIZE)
    with pytest.raises(TokenizationError) as caught:
        tokenizer.render_chat(check_messages(CONVERSATIONS[conversation]))
    assert str(caught.value) == REFUSES + message


@pytest.mark.parametrize(
    ("family", "conversation", "expected"),
    [
        (
            "qwen2",
            "turns",
            "<|im_start|>system\nYou are a careful helper.<|im_end|>\n<|im_start|>user\nOne?"
            "<|im_end|>\n<|im_start|>assistant\n 1 \n<|im_end|>\n<|im_start|>user\nTwo?"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "gemma2",
            "turns",
            "<bos><start_of_turn>user\nOne?<end_of_turn>\n<start_of_turn>model\n1<end_of_turn>\n"
            "<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("mistral", "turns", "<s>[INST] One?[/INST] 1</s>[INST] Two?[/INST]"),
        ("phi3", "answer_last", "<|user|>\nOne?<|end|>\n<|assistant|>\n1<|end|>\n<|assistant|>\n"),
    ],
)
def test_prompts_word_by_word(
    tmp_path: Path, family: str, conversation: str, expected: str
) -> None:
    tokenizer = HFTokenizer(write(tmp_path, family), VOCAB_SIZE)
    assert tokenizer.render_chat(CONVERSATIONS[conversation]) == expected


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_where_the_family_ends_it(tmp_path: Path, family: str, named: bool) -> None:
    """Also if neither config.json nor tokenizer_config.json names an end token."""
    write(tmp_path, family, named=named)
    keys = {"model": str(tmp_path), "load_format": "dummy"}
    config, tokenizer = load_model_and_tokenizer(EngineConfig().with_keys(**keys))
    assert {tokenizer.written(one) for one in config.eos_token_ids} == FAMILIES[family].ends


def test_the_reasoning_of_gpt_oss_ends_no_answer_whatever_its_template_writes(
    tmp_path: Path,
) -> None:
    write(tmp_path, "gpt_oss")
    template = FAMILIES["gpt_oss"].template.replace('end="<|return|>"', 'end="<|end|>"')
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = HFTokenizer(tmp_path, VOCAB_SIZE)
    ends = {tokenizer.written(one) for one in tokenizer.end_token_ids}
    assert ends == FAMILIES["gpt_oss"].ends
