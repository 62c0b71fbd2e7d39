"""How many layers and tokens the encoder needs: accuracy against latency.

    python benchmarks/length_prediction/encoder_sizes.py --instructions FILE --count 1500

FILE as for output_lengths.py; the lengths are those of its answers. Seven tenths of the prompts are
learned, three asked. Prints the mean log error of the neighbours' weighted median and the median
processor time of embedding a prompt that has all the tokens that are read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from accuracy import answer_lengths
from fastserve_backend.length_prediction.encoder import Encoder
from fastserve_backend.length_prediction.past_jobs import PastJobs
from fastserve_backend.length_prediction.predictor import NUM_NEIGHBOURS, median_length
from instructions import read_instructions

# Layers, first and last tokens.
_SIZES = ((6, 48, 16), (6, 12, 4), (4, 12, 4), (3, 24, 8), (3, 12, 4), (3, 6, 2), (2, 12, 4))
_TIMED = 50
_LONG_TEXT = "Tell me all that there is to be said of it. " * 20


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--instructions", type=Path, required=True, metavar="FILE")
    options.add_argument("--count", type=int, default=1500, help="prompts, by hash (1500)")
    args = options.parse_args()
    torch.set_num_threads(1)
    some = sorted(read_instructions(args.instructions), key=lambda one: one.sha256)[: args.count]
    lengths = list(answer_lengths(some).values())
    print("| layers | tokens, first + last | log error | ms |\n|---|---|---|---|")
    for num_layers, first, last in _SIZES:
        encoder = Encoder(num_layers, first, last)
        error = _log_error(encoder, [one.prompt for one in some], lengths)
        milliseconds = median(_milliseconds(encoder) for _ in range(_TIMED))
        print(f"| {num_layers} | {first} + {last} | {error:.3f} | {milliseconds:.1f} |", flush=True)


def _log_error(encoder: Encoder, prompts: Sequence[str], lengths: Sequence[int]) -> float:
    embeddings = [encoder.embed(prompt) for prompt in prompts]
    past = PastJobs(len(prompts))
    num_known = len(prompts) * 7 // 10
    for embedding, length in zip(embeddings[:num_known], lengths[:num_known], strict=True):
        past.add(embedding, length)
    return mean(
        abs(float(np.log(median_length(past.nearest(embedding, NUM_NEIGHBOURS)) / length)))
        for embedding, length in zip(embeddings[num_known:], lengths[num_known:], strict=True)
    )


def _milliseconds(encoder: Encoder) -> float:
    begin = time.thread_time()
    encoder.embed(_LONG_TEXT)
    return (time.thread_time() - begin) * 1e3


if __name__ == "__main__":
    main()
