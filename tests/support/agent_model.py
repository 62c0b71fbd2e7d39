"""A model that holds an agent's conversation: two small layers with random weights, the embedded
model's tokenizer, and a long context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastserve_backend.checkpoints.embedded import embedded_file
from fastserve_backend.checkpoints.gguf_file import GGUFFile
from fastserve_backend.checkpoints.gguf_tokenizer import save_tokenizer

CONTEXT_TOKENS = 65_536
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 49_152,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or () %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def save_agent_model(directory: Path) -> Path:
    """Saves the model's files; returns ``directory``."""
    save_tokenizer(GGUFFile(embedded_file()), directory)
    (directory / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"chat_template": _TEMPLATE}), encoding="utf-8")
    return directory


def agent_engine(model: Path) -> dict[str, Any]:
    """Keys of the engine's configuration: room for four of the longest conversations."""
    return {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
        "device_blocks": 4 * CONTEXT_TOKENS // 16,
        "swap_space_gib": 0.1,
    }
