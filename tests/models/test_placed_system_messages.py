"""System messages anywhere in a conversation, for templates that take one at the front, or none."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_backend.checkpoints.chat_options import ChatOptions
from fastserve_backend.checkpoints.chat_template import ChatTemplate, ChatTemplateError

WRITE = "{{ '[' + message.role + ']' + message.content }}"
ANY = f"{{% for message in messages %}}{WRITE}{{% endfor %}}"
FIRST_ONLY = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    f"{WRITE}{{% endfor %}}"
)
SILENT = (
    "{% for message in messages %}{% if message.role != 'system' or loop.first %}"
    f"{WRITE}{{% endif %}}{{% endfor %}}"
)
ALTERNATING = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for message in turns %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
) + FIRST_ONLY
AS_JSON = "{{ messages | tojson }}"


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def render(source: str, *messages: dict[str, str], **options: Any) -> str:
    return ChatTemplate(source, {}).render(messages, ChatOptions(**options))


@pytest.mark.parametrize("source", [FIRST_ONLY, SILENT, ALTERNATING])
def test_those_before_the_first_answer_are_joined_at_the_front(source: str) -> None:
    joined = "[system]A\n\nB[user]Hi"
    assert render(source, system("A"), system("B"), user("Hi")) == joined
    assert render(source, system("A"), user("Hi"), system("B")) == joined
    assert render(source, user("Hi"), system("A"), system("B")) == joined


@pytest.mark.parametrize("source", [FIRST_ONLY, SILENT, ALTERNATING])
def test_later_ones_stay_behind_the_same_beginning(source: str) -> None:
    turn = [system("A"), user("Hi"), assistant("Yes?")]
    beginning = "[system]A[user]Hi[assistant]Yes?"
    for more in ([system("B"), user("Go")], [system("B\n\nGo")], [user("B"), system("Go")]):
        assert render(source, *turn, *more) == f"{beginning}[user]B\n\nGo"


def test_a_template_that_takes_them_gets_them_as_they_are() -> None:
    told = render(ANY, system("A"), system("B"), user("Hi"), assistant("Yes?"), system("C"))
    assert told == "[system]A[system]B[user]Hi[assistant]Yes?[system]C"


def test_a_template_that_writes_texts_in_another_form() -> None:
    messages = [user("Hi"), system('say "A"')]
    assert render(AS_JSON, *messages) == (
        '[{"role": "user", "content": "Hi"}, {"role": "system", "content": "say \\"A\\""}]'
    )


def test_an_answer_is_continued() -> None:
    options = {"continue_final_message": True}
    told = render(FIRST_ONLY, user("Hi"), system("A"), assistant("Ye"), **options)
    assert told == "[system]A[user]Hi[assistant]Ye"


def test_a_template_that_takes_none_refuses_in_its_own_words() -> None:
    source = "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception("
    source += "'No system at ' ~ loop.index0) }}{% endif %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=r"refuses: No system at 1$"):
        render(source, user("Hi"), system("A"))
