"""Chat templates render the same prompts as in transformers; templates that misbehave are
stopped."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.checkpoints.chat_options import (
    MAX_KWARGS_CHARS,
    MAX_TOOLS,
    MAX_TOOLS_CHARS,
    ChatOptions,
)
from fastserve_backend.checkpoints.chat_template import ChatTemplate, ChatTemplateError
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.tokenizer import TokenizationError
from fastserve_backend.errors import InvalidRequestError
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 300

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{{- bos_token }}\n{%- if not tools is defined %}\n    {%- set tools = none %}\n{%- endif %}\n"
    "{%- if tools is not none %}\n    {{- 'Tools!' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- set content = '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim"
    " + '<|im_end|>' %}\n    {{- content }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n\n' }}\n{%- endif %}\n"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama_2": LLAMA_2,
    "llama_3": LLAMA_3,
    "tools_are_none": "{{ 'none' if tools is none and documents is none else tools }}",
    "tools_are_named": "{{ 'yes' if tools is defined else 'no' }}{{ custom is defined }}",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n"
        "{% generation %}\n{{ m.content }}{{ eos_token }}\n{% endgeneration %}\n"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "whitespace": (
        "  {% for m in messages %}\n    {{ m.role }}:\n    {%- if m.content %}\n  {{ m.content }}\n"
        "    {% endif %}\n{% endfor %}\n"
    ),
    "json": (
        "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|"
        "{{ messages[0] | tojson(ensure_ascii=True, sort_keys=True) }}|"
        "{{ messages | tojson(ensure_ascii=False) }}|{{ '<&>' | tojson }}|"
        "{{ {'b': 1, 'a': [none, true]} | tojson(separators=(',', ':')) }}"
    ),
    "date": "{{ strftime_now('%Y-%m') }} {% if strftime_now is defined %}now{% endif %}",
    "loop_controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "namespace_and_macro": (
        "{% macro turn(m) %}[{{ m.role | upper }}]{{ m.content }}{% endmacro %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ turn(m) }}{% endfor %}{{ ns.n }}{{ messages[-1].content.split('?')[0].strip() }}"
    ),
    "html_is_not_escaped": "{{ messages[0].content }}<b>&amp;</b>",
    "undefined_is_empty": "{{ nothing }}{{ messages[0].nothing }}|{{ pad_token }}|{{ unk_token }}",
}
CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi?"}],
    [{"role": "user", "content": "  <b>&\"'ü 日本 😀\n\n  "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": " 1 "},
        {"role": "user", "content": "Two?"},
    ],
    [{"role": "user", "content": "</s><|im_end|>{{ 7 * 7 }}"}],
]


def write_tokenizer(directory: Path, **settings: Any) -> Path:
    """A tokenizer of bytes that begins every text with <s>, as Llama 3's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    fast = FastTokenizer(models.BPE(vocab, []))
    fast.add_special_tokens(SPECIAL)
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    directory.mkdir(exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def encode_both(directory: Path, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    theirs = AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ours = HFTokenizer(directory, VOCAB_SIZE)
    return ours.encode(ours.render_chat(messages), special_tokens=False), expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(tmp_path: Path, name: str, messages: list[dict[str, str]]) -> None:
    directory = write_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    ours, theirs = encode_both(directory, messages)
    if name == "date" and ours != theirs:  # a month began between them
        ours, theirs = encode_both(directory, messages)
    assert ours == theirs
    assert ours


def test_one_begin_token(tmp_path: Path) -> None:
    """The template gives a chat its begin token, so the tokenizer must not add another one."""
    tokenizer = HFTokenizer(write_tokenizer(tmp_path, chat_template=LLAMA_3), VOCAB_SIZE)
    ids = tokenizer.encode(tokenizer.render_chat(CONVERSATIONS[0]), special_tokens=False)
    assert ids.count(0) == 1
    assert ids[0] == 0
    assert tokenizer.encode("Hi")[0] == 0


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "I begin."}],
        [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}],
    ],
)
def test_refusal_says_what_the_template_says(
    tmp_path: Path, messages: list[dict[str, str]]
) -> None:
    tokenizer = HFTokenizer(write_tokenizer(tmp_path, chat_template=LLAMA_2), VOCAB_SIZE)
    with pytest.raises(
        TokenizationError, match="chat template refuses: Conversation roles must alternate"
    ):
        tokenizer.render_chat(messages)
    assert tokenizer.render_chat(CONVERSATIONS[0])  # it still works


class TestWhereATemplateComesFrom:
    ONE, OTHER = "one", "{{ messages[0].content }}"

    def text(self, directory: Path) -> str:
        messages = [{"role": "user", "content": "other"}]
        ours, theirs = encode_both(directory, messages)
        assert ours == theirs
        return HFTokenizer(directory, VOCAB_SIZE).decode(ours)

    def test_file_wins_over_settings(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, chat_template=self.ONE)
        assert self.text(tmp_path) == "one"
        (tmp_path / "chat_template.jinja").write_text(self.OTHER)
        assert self.text(tmp_path) == "other"

    def test_list_by_name(self, tmp_path: Path) -> None:
        named = [
            {"name": "tool_use", "template": self.ONE},
            {"name": "default", "template": self.OTHER},
        ]
        write_tokenizer(tmp_path, chat_template=named)
        assert self.text(tmp_path) == "other"

    def test_object_by_name(self, tmp_path: Path) -> None:
        named = {"tool_use": self.ONE, "default": self.OTHER}
        write_tokenizer(tmp_path, chat_template=named)
        assert self.text(tmp_path) == "other"

    def test_default_file_beside_others(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path, chat_template=self.ONE)
        (tmp_path / "chat_template.jinja").write_text(self.OTHER)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(self.ONE)
        assert self.text(tmp_path) == "other"

    @pytest.mark.parametrize("as_files", [True, False])
    def test_another_one_for_tools(self, tmp_path: Path, as_files: bool) -> None:
        other = "{{ tools[0].name }}"
        named = {"default": self.OTHER, "tool_use": other}
        write_tokenizer(tmp_path, **({} if as_files else {"chat_template": named}))
        if as_files:
            (tmp_path / "chat_template.jinja").write_text(self.OTHER)
            (tmp_path / "additional_chat_templates").mkdir()
            (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(other)
        ours, theirs = HFTokenizer(tmp_path, VOCAB_SIZE), AutoTokenizer.from_pretrained(tmp_path)
        assert (ours.chat_template, ours.tool_template) == (self.OTHER, other)
        messages, tools = [{"role": "user", "content": "x"}], [{"name": "add"}]
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert ours.render_chat(messages, ChatOptions(tools=tools)) == expected == "add"
        for none in (None, []):  # unlike transformers, an empty list is no list
            assert ours.render_chat(messages, ChatOptions(tools=none)) == "x"

    def test_file_of_a_processor(self, tmp_path: Path) -> None:
        """Where transformers' tokenizer has no template, its processor has one."""
        write_tokenizer(tmp_path)
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": self.OTHER}))
        messages = [{"role": "user", "content": "other"}]
        assert HFTokenizer(tmp_path, VOCAB_SIZE).render_chat(messages) == "other"
        write_tokenizer(tmp_path, chat_template=self.ONE)
        assert HFTokenizer(tmp_path, VOCAB_SIZE).render_chat(messages) == "one"

    def test_special_tokens_with_flags_and_of_the_model_alone(self, tmp_path: Path) -> None:
        flags = {"__type": "AddedToken", "lstrip": False, "rstrip": False, "normalized": False}
        flags |= {"single_word": False, "special": True}
        write_tokenizer(
            tmp_path,
            bos_token={"content": "<s>", **flags},
            extra_special_tokens={"image_token": "<|im_start|>"},
            chat_template="{{ bos_token }}{{ image_token }}{{ eos_token }}",
        )
        ours, theirs = encode_both(tmp_path, [{"role": "user", "content": ""}])
        assert ours == theirs == [0, 3, 1]

    @pytest.mark.parametrize("settings", [{}, {"chat_template": None}, {"chat_template": []}])
    def test_none(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        tokenizer = HFTokenizer(write_tokenizer(tmp_path, **settings), VOCAB_SIZE)
        with pytest.raises(TokenizationError, match="no chat template; send a prompt as text"):
            tokenizer.render_chat(CONVERSATIONS[0])

    @pytest.mark.parametrize(
        "source", ["{% for m in messages %}", "{{ messages", "{% nothing %}", "{{ 'x' | nothing }}"]
    )
    def test_broken(self, tmp_path: Path, source: str) -> None:
        write_tokenizer(tmp_path, chat_template=source)
        with pytest.raises(ModelError, match=r"of tokenizer_config\.json cannot be read"):
            HFTokenizer(tmp_path, VOCAB_SIZE)


def render(source: str, content: str = "x") -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": content}])


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ strftime_now.__globals__['os'] }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
            "{{ ('{0.__globals__[json]}' | attr('format'))(raise_exception) }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}",
        ],
    )
    def test_nothing_is_reached(self, source: str) -> None:
        with pytest.raises(ChatTemplateError):
            render(source)

    @pytest.mark.parametrize(
        "expression",
        [
            "messages[0]['content'].__class__",
            "''['__class__']",
            "('' | attr('__class__'))",
            "raise_exception.__globals__",
            "self.__init__",
            "'{0.__class__}'.format(messages)",
            "'{m.__class__}'.format_map({'m': messages})",
            "(messages | map(attribute='__class__') | list)[0]",
        ],
    )
    def test_what_is_private_is_as_if_it_were_not_there(self, expression: str) -> None:
        assert render("[{{ " + expression + " }}]") == "[]"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.append(1) }}",
            "{{ messages.clear() }}",
            "{{ messages[0].update(content='changed') }}",
            "{{ messages[0].pop('content') }}",
        ],
    )
    def test_messages_are_not_changed(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match=r"not safely|unsafe|immutable|safe"):
            render(source)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
            ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{{ messages[0].content + 1 }}", "TypeError"),
            ("{{ nothing.deeper }}", "undefined"),
            ("{{ messages | tojson(unknown=1) }}", "TypeError"),
        ],
    )
    def test_errors_of_a_template_are_refusals(self, source: str, message: str) -> None:
        with pytest.raises(ChatTemplateError, match=message):
            render(source)

    def test_content_is_no_template(self) -> None:
        assert render("{{ messages[0].content }}", "{{ 7 * 7 }}{% x %}") == "{{ 7 * 7 }}{% x %}"

    def test_callers_messages_stay(self) -> None:
        messages = [{"role": "user", "content": "x"}]
        template = ChatTemplate("{% set messages = messages + [1] %}{{ messages | length }}", {})
        assert template.render(messages) == "2"
        assert messages == [{"role": "user", "content": "x"}]


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"tools": "add"}, "tools: got 'str'; must be a list of objects"),
            ({"tools": ["add"]}, "tools[0]: got 'str'; must be an object"),
            ({"tools": [{"name": print}]}, "tools: got 'list'; must be valid JSON"),
            ({"tools": [{}] * (MAX_TOOLS + 1)}, f"tools: got '1025 tools'; at most {MAX_TOOLS}"),
            ({"tools": [{"name": "a" * MAX_TOOLS_CHARS}]}, "tools: got '524302 characters'; at"),
            ({"kwargs": []}, "chat_template_kwargs: got 'list'; must be an object"),
            ({"kwargs": {"tools": None}}, "chat_template_kwargs: got 'tools'; no variable of this"),
            ({"kwargs": {"a": "b" * MAX_KWARGS_CHARS}}, "chat_template_kwargs: got '262153 char"),
            (
                {"add_generation_prompt": True, "continue_final_message": True},
                "continue_final_message: got True; must be false with add_generation_prompt",
            ),
        ],
    )
    def test_bad_ones(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            ChatOptions(**given)
        assert str(caught.value).startswith(message)

    def test_any_other_name_is_a_variable(self) -> None:
        template = ChatTemplate("{{ context }}{{ name }}{{ range }}", {"name": "<s>"})
        kwargs = {"context": 1, "name": 2, "range": 3}
        assert template.render([], ChatOptions(kwargs=kwargs)) == "123"

    def test_tools_are_not_changed(self) -> None:
        template = ChatTemplate("{{ tools[0].update(name='x') }}", {})
        with pytest.raises(ChatTemplateError, match=r"unsafe|safe"):
            template.render([], ChatOptions(tools=[{"name": "add"}]))


def test_date_is_today() -> None:
    before = datetime.now().strftime("%d %b %Y")
    text = render("{{ strftime_now('%d %b %Y') }}")
    assert text in (before, datetime.now().strftime("%d %b %Y"))
