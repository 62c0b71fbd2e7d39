"""Chat templates in the manner of families of models, and the tokens that they write.

They are short, but have the constructs with which the families' own templates are written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """How models of one family are told what was said."""

    template: str
    special: tuple[str, ...]
    """Special tokens. The first one is named as the end token, unless `eos` says otherwise."""
    ends: frozenset[str]
    """The tokens that end an answer."""
    eos: str | None = None
    bos: str | None = None
    as_text: tuple[str, ...] = ()
    """Added tokens that are not special."""


_QWEN_2 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a careful helper.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system") or (message.role == "assistant" \
and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem is undefined or loop.previtem.role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_QWEN_3 = """\
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and \
not(message.content.startswith('<tool_response>') and message.content.endswith('</tool>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' }}
            {{- reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

_MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls \
is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should have length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS] " + {"content": message.content}|tojson + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

_GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

_GEMMA_3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim if item['type'] == 'text' }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

_PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

_PHI_4 = (
    "{% for message in messages %}{% if (message['role'] in ['system', 'user']) %}"
    "{{'<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>'}}"
    "{% elif (message['role'] == 'assistant') %}"
    "{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)

_PHI_4_MINI = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)

_GRANITE_3 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge ends in April 2024.
Today's Date: " + strftime_now('%B %d, %Y') + ".
You are a careful helper." %}
    {%- if tools and documents %}
        {%- set system_message = system_message + " Use tools and documents." %}
    {%- elif documents %}
        {%- set system_message = system_message + " Use documents." %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + \
'<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}
            {{- ' ' + controls | tojson() }}
        {%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

_SMOLLM_3 = """\
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}
    {%- set reasoning_mode = "/no_think" -%}
  {%- endif -%}
  {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\\n" -}}
{%- if custom and "/system_override" in custom -%}
  {{- custom.replace("/system_override", "").rstrip() ~ "<|im_end|>\\n" -}}
{%- else -%}
  {%- set today = strftime_now("%d %B %Y") -%}
  {{- "## Metadata\\n\\nToday Date: " ~ today -}}
  {{- "\\nReasoning Mode: " + reasoning_mode + "\\n\\n" -}}
  {{- custom ~ "\\n\\n" if custom else "You are a careful helper.\\n\\n" -}}
  {{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n"  + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + \
"<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}
        {{ "<|im_start|>" + "user\\n"  + content + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}
        {{ "<|im_start|>assistant\\n" }}
    {%- else -%}
        {{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n"  }}
    {%- endif -%}
{%- endif -%}
"""

_LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson(indent=4) }}
        {%- for name, value in tool_call.arguments | items %}
            {{- " " ~ name ~ "=" ~ value }}
        {%- endfor %}
        {{- "}" + "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_OLMO = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)

_FALCON_3 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% if not loop.last %}"
    "{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}{% else %}"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% continue %}{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

_STARCODER_2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ message['content'] }}{% elif message['role'] == 'user' %}"
    "{{ '\n\n### Instruction\n' + message['content'] | trim }}{% else %}"
    "{{ '\n\n### Response\n' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    "{{ '\n\n### Response\n' if add_generation_prompt }}"
)

_GPT_OSS = """\
{%- macro turn(role, content, channel=none, end="<|end|>") -%}
    {{- "<|start|>" + role }}
    {%- if channel is not none %}
        {{- "<|channel|>" + channel }}
    {%- endif %}
    {{- "<|message|>" + content + end }}
{%- endmacro -%}
{%- macro system_text() -%}
    {{- "You are a careful helper.\\nKnowledge cutoff: 2024-06\\n" }}
    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {%- if reasoning_effort is not defined %}
        {%- set reasoning_effort = "medium" %}
    {%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\\n\\n" }}
    {{- "# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- turn("system", system_text()) }}
{%- if messages[0].role in ("developer", "system") %}
    {{- turn("developer", "# Instructions\\n\\n" + messages[0].content, end="<|end|>") }}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message %}
            {%- set future = namespace(found=false) %}
            {%- for later in loop_messages[loop.index:] %}
                {%- if later.role == 'assistant' and "tool_calls" not in later %}
                    {%- set future.found = true %}
                    {%- break %}
                {%- endif %}
            {%- endfor %}
            {%- set tool_call = message.tool_calls[0].function %}
            {%- if message.content and not future.found %}
                {{- turn("assistant", message.content, channel="analysis") }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + tool_call.name }}
            {{- "<|channel|>commentary json<|message|>" + tool_call.arguments|tojson + "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- turn("assistant", message.content, channel="final", end="<|return|>") }}
        {%- else %}
            {{- turn("assistant", message.content, channel="final") }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("Message has tool role, but there was no previous call!") }}
        {%- endif %}
        {{- turn("functions." + last_tool_call.name + " to=assistant", message.content|tojson, \
channel="commentary") }}
    {%- elif message.role == 'user' -%}
        {{- turn("user", message.content) }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

_IM = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")

FAMILIES = {
    "qwen2": Family(_QWEN_2, _IM, frozenset({"<|im_end|>", "<|endoftext|>"})),
    "qwen3": Family(
        _QWEN_3,
        _IM,
        frozenset({"<|im_end|>", "<|endoftext|>"}),
        as_text=("<think>", "</think>", "<tool_response>", "</tool_response>"),
    ),
    # A base model: its files name the end of a text alone.
    "qwen3_base": Family(
        _QWEN_3, _IM, frozenset({"<|im_end|>", "<|endoftext|>"}), eos="<|endoftext|>"
    ),
    "mistral": Family(
        _MISTRAL,
        ("</s>", "<s>", "<unk>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        frozenset({"</s>"}),
        bos="<s>",
    ),
    "gemma2": Family(
        _GEMMA_2,
        ("<eos>", "<bos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        frozenset({"<eos>", "<end_of_turn>"}),
        bos="<bos>",
    ),
    "gemma3": Family(
        _GEMMA_3,
        ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        frozenset({"<eos>", "<end_of_turn>"}),
        bos="<bos>",
    ),
    "phi3": Family(
        _PHI_3,
        ("<|endoftext|>", "<s>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        frozenset({"<|endoftext|>", "<|end|>"}),
        bos="<s>",
    ),
    "phi4": Family(
        _PHI_4,
        ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|im_sep|>"),
        frozenset({"<|im_end|>", "<|endoftext|>"}),
    ),
    "phi4_mini": Family(
        _PHI_4_MINI,
        ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>", "<|tool_call|>"),
        frozenset({"<|endoftext|>", "<|end|>"}),
    ),
    "granite3": Family(
        _GRANITE_3,
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        frozenset({"<|end_of_text|>"}),
    ),
    "smollm3": Family(
        _SMOLLM_3,
        ("<|im_end|>", "<|im_start|>", "<|end_of_text|>", "<|begin_of_text|>"),
        frozenset({"<|im_end|>", "<|end_of_text|>"}),
    ),
    "llama3": Family(
        _LLAMA_3,
        (
            "<|eot_id|>",
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|eom_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
        ),
        frozenset({"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}),
        bos="<|begin_of_text|>",
    ),
    "olmo2": Family(
        _OLMO, ("<|endoftext|>", "<|pad|>"), frozenset({"<|endoftext|>"}), bos="<|endoftext|>"
    ),
    "olmoe": Family(
        _OLMO,
        ("<|endoftext|>", "<|padding|>", "|||IP_ADDRESS|||"),
        frozenset({"<|endoftext|>"}),
        bos="|||IP_ADDRESS|||",
    ),
    "falcon3": Family(
        _FALCON_3,
        ("<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>"),
        frozenset({"<|endoftext|>"}),
    ),
    "starcoder2": Family(
        _STARCODER_2,
        ("<|endoftext|>", "<fim_prefix>", "<file_sep>"),
        frozenset({"<|endoftext|>"}),
        bos="<|endoftext|>",
    ),
    "gpt_oss": Family(
        _GPT_OSS,
        (
            "<|return|>",
            "<|startoftext|>",
            "<|endoftext|>",
            "<|channel|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|call|>",
        ),
        # Not <|end|>: the answer proper comes after the reasoning that it ends.
        frozenset({"<|return|>", "<|call|>", "<|endoftext|>"}),
        bos="<|startoftext|>",
    ),
}
