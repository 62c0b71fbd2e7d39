"""What INT8 KV costs a model in perplexity on real text: on the host (kv_cache.host_dtype: int8)
and on the device (device_dtype).

    python benchmarks/int8_kv_perplexity.py [--model MODEL] [--text FILE] [--dtype bfloat16]

The text is Python's language reference as it comes with Python (pydoc's topics), or FILE. It is
read in windows: the KV of a window's first tokens goes through the engine's quantization, to codes
and back, as if the job had been swapped out and in; then the probability of each of the tokens
after them is taken, with the exact KV and with the changed one. With INT8 on the device all keys
and values are rounded as they are made, those of the scored tokens too. Perplexity is the
exponential of the mean negative log-probability over all windows.

--model is as of fastserve serve. transformers runs it.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_kernels.int8_cache import dequantize_tokens, quantize_tokens
from int8_kv_error import DTYPES, cache_of, kv_of, load, round_trip
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

SWAPPED_TOKENS = 512
SCORED_TOKENS = 256


class RoundedCache(DynamicCache):
    """Keys and values as a cache in INT8 on the device has them."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = (
            dequantize_tokens(*quantize_tokens(tokens), tokens.dtype)
            for tokens in (key_states, value_states)
        )
        return super().update(keys, values, layer_idx, *args, **kwargs)


def losses(model: Any, kv: Tensor, tokens: Tensor) -> float:
    """Mean negative log-probability of tokens[1:], each after all before it; ``kv`` precedes
    tokens[0]."""
    logits = model(tokens[None, :-1], past_key_values=cache_of(kv), use_cache=True).logits[0]
    return float(torch.nn.functional.cross_entropy(logits.float(), tokens[1:]))


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, DTYPES[arguments.dtype])
    text = (
        "\n".join(pydoc_data.topics.topics.values())
        if arguments.text is None
        else arguments.text.read_text(encoding="utf-8")
    )
    tokens = torch.tensor(tokenizer(text).input_ids)
    window = SWAPPED_TOKENS + SCORED_TOKENS + 1
    count = min(arguments.windows, len(tokens) // window)
    if count == 0:
        sys.exit(f"the text has {len(tokens)} tokens; one window takes {window}")
    exact, on_host, on_device = [], [], []
    stride = len(tokens) // count
    for number in track(range(count), "reading", transient=True):
        part = tokens[number * stride : number * stride + window]
        cache = DynamicCache()
        model(part[None, :SWAPPED_TOKENS], past_key_values=cache, logits_to_keep=1)
        kv = kv_of(cache)
        exact.append(losses(model, kv, part[SWAPPED_TOKENS:]))
        on_host.append(losses(model, round_trip(kv), part[SWAPPED_TOKENS:]))
        logits = model(part[None, :-1], past_key_values=RoundedCache()).logits[0, SWAPPED_TOKENS:]
        on_device.append(
            float(torch.nn.functional.cross_entropy(logits.float(), part[SWAPPED_TOKENS + 1 :]))
        )
    table = Table(title=f"{count} windows of {SWAPPED_TOKENS} + {SCORED_TOKENS} tokens")
    for heading in ("KV", "perplexity", "change", "of windows"):
        table.add_column(heading, justify="right")
    table.add_row(f"same ({arguments.dtype})", f"{math.exp(statistics.mean(exact)):.3f}", "", "")
    for name, changed in (("int8 on the host", on_host), ("int8 on the device", on_device)):
        differences = [b - a for a, b in zip(exact, changed, strict=True)]
        mean, least, most = (math.expm1(of(differences)) for of in (statistics.mean, min, max))
        table.add_row(
            name,
            f"{math.exp(statistics.mean(changed)):.3f}",
            f"{mean:+.2%}",
            f"{least:+.2%} to {most:+.2%}",
        )
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
