"""How much INT8 KV on the host (kv_cache.host_dtype: int8) changes what a trained model says.

    python benchmarks/int8_kv_error.py

--model is as of fastserve serve. transformers runs the model; its KV cache goes through the
engine's quantization, to codes and back, in blocks of 16 tokens. The unused rows of a last block
hold NaN: read, they would show.

"Next token": the logits after prefill's token, with the prompt's KV round-tripped against with the
exact KV; their absolute difference, and in brackets its share of the exact logits' standard
deviation. "Swapped once": of 200 greedy tokens, how many differ from those with the exact KV when
the prompt's KV is round-tripped after prefill, and the first that does. "Swapped 4 times": all KV
is round-tripped before the 1st, 51st, 101st and 151st token; as with incremental swaps, a block
keeps the codes that it got when it was full. Tokens are compared position by position: after the
first that differs the texts go their own ways. The end-of-text token does not end a text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_kernels.kv_quantization import dequantize, quantize
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

BLOCK_SIZE = 16
OUTPUT_TOKENS = 200
SWAPPED_ONCE = (0,)
SWAPPED_OFTEN = (0, 50, 100, 150)  # tokens generated before each swap
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

PROMPTS = {
    "harbour": (
        "The harbour was quiet when the ferry came in that morning. A thin fog lay over the water, "
        "and the gulls sat in a row on the wall as if they had been told to wait. Only two people "
        "stood at the end of the pier: an old man with a wooden box, and a girl who held a letter "
        "that she had not yet opened. Continue this story in the same style, and tell what is in "
        "the letter and why the old man brought the box."
    ),
    "tides": (
        "Explain to a twelve-year-old why the sea has tides, why there are two of them a day and "
        "not one, and why some are higher than others. Use examples from a day at the beach."
    ),
    "soup": (
        "I have four carrots, two leeks, half a cabbage, a tin of white beans, an onion, garlic, "
        "some old bread and a piece of hard cheese. There is olive oil, salt, pepper and dried "
        "thyme in the cupboard, but no stock. I have one large pot and about an hour. Write a "
        "recipe for a soup for four people from this, with quantities, the order of the steps and "
        "the time for each of them, and say at the end what could be prepared the day before."
    ),
    "complaint": (
        "Write a polite but firm letter to a railway company. On the third of May the 7.42 train "
        "from Aldbury was cancelled without notice, and the next one was so full that I could not "
        "board. I missed a job interview. At the ticket office I was told that nothing could be "
        "done because my ticket was a reduced one. I want the fare back, the cost of the taxi "
        "that I took in the end, and an explanation of why the notice boards showed the train as "
        "on time until ten minutes after it should have left. I have kept all receipts. I would "
        "also like to know what the company does so that this does not happen again, because two "
        "of my neighbours tell me that the same train was cancelled twice in April."
    ),
    "code": (
        "Write a Python function that takes a list of intervals, each a pair of start and end, and "
        "returns the list of merged intervals, sorted by start. Intervals that only touch are "
        "merged too. Then explain how it works line by line, what its running time is, and which "
        "three tests you would write first."
    ),
    "clocks": (
        "Before there were railways, every town kept its own time. Noon was when the sun stood "
        "highest, and because the earth turns, noon came to an eastern town some minutes before "
        "it came to a western one. Nobody minded: a coach was slow, its driver carried a watch "
        "that was set to lose or gain a few minutes a day on purpose, and a traveller who arrived "
        "simply asked for the hour. Trains changed this. Two of them on a single track, each "
        "keeping the time of the town that it had left, could meet where neither expected the "
        "other. The companies therefore ran all their clocks by the time of one city, sent along "
        "the line by telegraph, and for some decades a station could have two clocks, or one clock "
        "with two minute hands, one for the trains and one for the town. In the end the towns gave "
        "in. It was not a law that made them: people got tired of missing trains. Later the "
        "governments agreed on a first meridian and on zones an hour wide, and what had been a "
        "matter for each church tower became a matter for treaties. Summarize this text in three "
        "sentences, and then discuss at length what a town lost and what it gained."
    ),
    "garden": (
        "My garden faces north, the soil is heavy clay, and for two weeks each spring the lower "
        "third of it stands under water. I would like flowers from March to October, something "
        "for bees, and as little work as possible after the first year. What should I plant, "
        "where, and in what order?"
    ),
    "meeting": (
        "Here are notes of a meeting. Anna: the new boiler is late, perhaps by three weeks; the "
        "old one can be repaired once more, for 800. Bashir: the library wants the large hall on "
        "Tuesdays, would pay 40 an evening, but the choir has it until June. Carla: the roof is "
        "dry again; the firm's bill is 300 lower than its offer. Anna will ask the choir whether "
        "the small hall would do. Nobody knows who has the third key. Next meeting on the ninth. "
        "Turn these notes into minutes, with decisions, open questions and who does what, and "
        "then draft a friendly message to the choir."
    ),
}

console = Console(width=100)


def round_trip(kv: Tensor, num_saved: int = 0, block_size: int = BLOCK_SIZE) -> Tensor:
    """KV as it is after a swap-out and a swap-in.

    Args:
        kv: ``[layers, 2, kv_heads, tokens, head_dim]``.
        num_saved: tokens that went to the host earlier; what was in full blocks of them stays.
    """
    first = num_saved // block_size * block_size
    new = kv[:, :, :, first:]
    if new.shape[3] == 0:
        return kv
    rows = dequantize(*quantize(*to_blocks(new, block_size)), kv.dtype)
    new = rows.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, : new.shape[3]]
    assert not new.isnan().any(), "an unused row was read"
    return torch.cat([kv[:, :, :, :first], new], dim=3)


def to_blocks(kv: Tensor, block_size: int) -> tuple[Tensor, int]:
    """A copy, ``[n, layers, 2, kv_heads, block_size, head_dim]``, unused rows NaN, and the number
    of tokens in the last block."""
    num_tokens = kv.shape[3]
    num_blocks = -(-num_tokens // block_size)
    rows = kv.new_full((*kv.shape[:3], num_blocks * block_size, kv.shape[4]), torch.nan)
    rows[:, :, :, :num_tokens] = kv
    blocks = rows.view(*kv.shape[:3], num_blocks, block_size, kv.shape[4])
    return blocks.permute(3, 0, 1, 2, 4, 5), num_tokens - (num_blocks - 1) * block_size


def kv_of(cache: DynamicCache) -> Tensor:
    """A copy, ``[layers, 2, kv_heads, tokens, head_dim]``, of the one sequence in the cache."""
    layers: Any = cache.layers
    return torch.stack([torch.cat([layer.keys, layer.values]) for layer in layers])


def cache_of(kv: Tensor) -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys[None], values[None], layer)
    return cache


def next_logits(model: Any, tokens: Sequence[int], cache: DynamicCache) -> Tensor:
    """float32 ``[vocabulary]``, after the last of the tokens; their KV is added to the cache."""
    ids = torch.tensor([tokens])
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float()


def generate(model: Any, token: int, kv: Tensor, swaps: Sequence[int] = ()) -> list[int]:
    """The greedy tokens after ``token``, which follows ``kv``; swapped after so many of them."""
    cache = cache_of(kv)
    tokens: list[int] = []
    num_saved = 0
    for number in range(OUTPUT_TOKENS):
        if number in swaps:
            exact = kv_of(cache)
            cache = cache_of(round_trip(exact, num_saved))
            num_saved = exact.shape[3]
        token = int(next_logits(model, [token], cache).argmax())
        tokens.append(token)
    return tokens


@dataclass(frozen=True)
class LogitError:
    """Of the next token's logits."""

    maximum: float
    mean: float
    deviation: float
    """The exact logits' standard deviation."""
    same_choice: bool
    """Whether the highest logit is the same token's."""


def logit_error(exact: Tensor, changed: Tensor) -> LogitError:
    difference = (exact - changed).abs()
    return LogitError(
        maximum=float(difference.max()),
        mean=float(difference.mean()),
        deviation=float(exact.std()),
        same_choice=bool(exact.argmax() == changed.argmax()),
    )


@dataclass(frozen=True)
class TokenError:
    """Of a generated text."""

    num_differ: int
    first: int | None
    """The first position that differs, from 1."""


def token_error(exact: Sequence[int], changed: Sequence[int]) -> TokenError:
    pairs = enumerate(zip(exact, changed, strict=True), start=1)
    positions = [position for position, (one, other) in pairs if one != other]
    return TokenError(len(positions), positions[0] if positions else None)


@dataclass(frozen=True)
class PromptResult:
    name: str
    num_tokens: int
    logits: LogitError
    once: TokenError
    often: TokenError


def measure(model: Any, name: str, prompt: Sequence[int]) -> PromptResult:
    cache = DynamicCache()
    token = int(next_logits(model, prompt, cache).argmax())
    kv = kv_of(cache)
    exact = next_logits(model, [token], cache_of(kv))
    changed = next_logits(model, [token], cache_of(round_trip(kv)))
    tokens = generate(model, token, kv)
    return PromptResult(
        name=name,
        num_tokens=len(prompt),
        logits=logit_error(exact, changed),
        once=token_error(tokens, generate(model, token, kv, SWAPPED_ONCE)),
        often=token_error(tokens, generate(model, token, kv, SWAPPED_OFTEN)),
    )


def load(model: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers. Raises ModelError if there are no such files."""
    directory = load_model_config(model, load_format="auto").directory
    assert directory is not None  # as of dummy weights alone
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype), tokenizer


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """As a user's message if the model was trained for conversations."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text).input_ids)
    message = {"role": "user", "content": text}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def show(results: Sequence[PromptResult], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("prompt")
    for heading in (
        "tokens",
        "next token:\nmax. |Δ| (σ)",
        "mean |Δ| (σ)",
        "same\nchoice",
        "swapped\nonce",
        "first\nat",
        f"swapped\n{len(SWAPPED_OFTEN)} times",
        "first\nat",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        logits = result.logits
        table.add_row(
            result.name,
            str(result.num_tokens),
            f"{logits.maximum:.3f} ({logits.maximum / logits.deviation:.1%})",
            f"{logits.mean:.3f} ({logits.mean / logits.deviation:.1%})",
            "yes" if logits.same_choice else "no",
            *token_cells([result.once]),
            *token_cells([result.often]),
            end_section=result is results[-1],
        )
    logits_of = [result.logits for result in results]
    maximum, mean = max(e.maximum for e in logits_of), statistics.mean(e.mean for e in logits_of)
    max_share = max(e.maximum / e.deviation for e in logits_of)
    mean_share = statistics.mean(e.mean / e.deviation for e in logits_of)
    table.add_row(
        "all",
        str(sum(result.num_tokens for result in results)),
        f"{maximum:.3f} ({max_share:.1%})",
        f"{mean:.3f} ({mean_share:.1%})",
        f"{sum(e.same_choice for e in logits_of)}/{len(results)}",
        *token_cells([result.once for result in results]),
        *token_cells([result.often for result in results]),
    )
    console.print(table)
    once = statistics.median(result.once.num_differ for result in results)
    often = statistics.median(result.often.num_differ for result in results)
    console.print(
        f"logits off by at most {maximum:.3f}, mean {mean:.4f}; tokens that differ of "
        f"{OUTPUT_TOKENS}, median over prompts: {once:g} swapped once, "
        f"{often:g} swapped {len(SWAPPED_OFTEN)} times"
    )


def token_cells(errors: Sequence[TokenError]) -> tuple[str, str]:
    """How many differ, and the earliest position that does."""
    positions = [error.first for error in errors if error.first is not None]
    return str(sum(error.num_differ for error in errors)), str(min(positions, default="–"))


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, DTYPES[arguments.dtype])
    results = [
        measure(model, name, prompt_tokens(tokenizer, text)) for name, text in PROMPTS.items()
    ]
    show(results, f"{arguments.model}, {arguments.dtype}; tokens that differ of {OUTPUT_TOKENS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
