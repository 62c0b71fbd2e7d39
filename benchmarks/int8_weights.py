"""What weights in INT8 (model.quantization: int8) cost a model, and what they gain on a CPU.

    python benchmarks/int8_weights.py                          # both parts, some minutes
    python benchmarks/int8_weights.py speed --model opt-1.3b   # dummy weights

"quality": the embedded model on Python's language reference (pydoc's topics), in windows, with its
weights as they are and rounded; transformers runs it, in float32. "speed": two engines, one of
which rounds, take turns; tokens/s as of benchmarks/cpu_decode.py, and the memory of the ranks.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import truediv

import psutil
import torch
from cpu_decode import MODEL, PREFILL_BATCH, PROMPT_TOKENS, Run, engine, summary
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_kernels.weight_quantization import rounded
from int8_kv_error import load
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

WINDOW, NUM_WINDOWS = 768, 40
"""Tokens, of which all but the first are scored."""
BATCHES = (1, 4, 16, PREFILL_BATCH)

console = Console(width=100)


@torch.inference_mode()
def quality() -> None:
    model, tokenizer = load(EMBEDDED_MODEL, torch.float32)
    tokens = torch.tensor(tokenizer("\n".join(pydoc_data.topics.topics.values())).input_ids)
    stride = len(tokens) // NUM_WINDOWS
    windows = [tokens[number * stride :][:WINDOW] for number in range(NUM_WINDOWS)]
    exact = [scores(model, window) for window in track(windows, "exact", transient=True)]
    round_linears(model)
    rounded = [scores(model, window) for window in track(windows, "int8", transient=True)]
    losses = [[loss for loss, _ in some] for some in (exact, rounded)]
    differences = [after - before for before, after in zip(*losses, strict=True)]
    same = [
        float((before == after).double().mean())
        for (_, before), (_, after) in zip(exact, rounded, strict=True)
    ]
    before, after = (math.exp(statistics.mean(some)) for some in losses)
    changes = [math.expm1(change(differences)) for change in (statistics.mean, min, max)]
    console.print(
        f"{EMBEDDED_MODEL}, {NUM_WINDOWS} windows of {WINDOW} tokens: perplexity {before:.3f}, "
        f"with weights in INT8 {after:.3f} ({changes[0]:+.2%}; windows from {changes[1]:+.2%} to "
        f"{changes[2]:+.2%}); the most likely token is the same at {statistics.mean(same):.1%} of "
        "all places"
    )


def scores(model: PreTrainedModel, window: Tensor) -> tuple[float, Tensor]:
    """Mean negative log-probability, and the most likely token at each place."""
    logits = model(window[None, :-1]).logits[0]
    return float(nn.functional.cross_entropy(logits, window[1:])), logits.argmax(-1)


def round_linears(model: PreTrainedModel) -> None:
    """As the engine rounds them; of a head that is tied to the embedding, the head alone."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(rounded(layer.weight.detach()))


def speed(model: str, repeats: int) -> None:
    with side(model, None) as exact, side(model, "int8") as int8:
        sides = {"bfloat16": exact, "int8": int8}
        rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in sides.values():
            run(1)  # warm
        for _ in range(repeats):
            for batch in BATCHES:
                for name, run in sides.items():
                    prefill, decode = run(batch)
                    rates[f"decode, batch {batch}"][name].append(decode)
                    if batch == PREFILL_BATCH:
                        rates[f"prefill, {batch} × {PROMPT_TOKENS} tokens"][name].append(prefill)
    table = Table(title=f"{model}, tokens/s, median \\[least, most]", title_justify="left")
    for heading in ("", *sides, "× as fast"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, of in rates.items():
        ratio = statistics.median(map(truediv, of["int8"], of["bfloat16"]))
        table.add_row(label, *(summary(of[name]) for name in sides), f"{ratio:.2f}")
    console.print(table)


@contextmanager
def side(model: str, quantization: str | None) -> Iterator[Run]:
    others = set(psutil.Process().children())
    with engine(model, quantization=quantization) as (_, run):
        run(1)
        ranks = set(psutil.Process().children()) - others
        resident = sum(rank.memory_info().rss for rank in ranks)
        console.print(f"{quantization or 'bfloat16'}: the rank has {resident / 2**20:.0f} MiB")
        yield run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=("quality", "speed"), help="default: both")
    parser.add_argument("--model", default=MODEL, help="of speed; a built-in name")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.part != "speed":
        quality()
    if arguments.part != "quality":
        speed(arguments.model, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
