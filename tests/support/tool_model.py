"""A model with random weights and the template of a Mistral model.

Its marks are special tokens, and its prompt ends with the mark of reasoning.
"""

from __future__ import annotations

import json
from pathlib import Path

from byte_tokenizer import NUM_BYTE_TOKENS, save_byte_tokenizer
from tiny_model import TINY_OPT

SPECIALS = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
TOOL_CALLS, _, _, END_OF_THOUGHT = range(NUM_BYTE_TOKENS, NUM_BYTE_TOKENS + len(SPECIALS))
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}
{{- '\\n' + message.role }}
{%- if message.reasoning_content %}{{ ' (' + message.reasoning_content + ')' }}{% endif %}
{{- ': ' + message.content }}
{%- for call in message.tool_calls or () %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- if call.id | length != 9 %}{{ raise_exception('ids of calls have 9 letters') }}{% endif %}
{%- endfor %}{% endfor %}
{%- if add_generation_prompt and thinking is not false %}{{ '\\n[THINK]' }}{% endif %}"""


def save_tool_model(directory: Path) -> Path:
    """Saves the files of the model, whose tokens are bytes and marks; returns ``directory``."""
    save_byte_tokenizer(directory, SPECIALS)
    for name, fields in (
        ("config.json", {**TINY_OPT, "vocab_size": NUM_BYTE_TOKENS + len(SPECIALS)}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        (directory / name).write_text(json.dumps(fields), encoding="utf-8")
    return directory
