"""Teaches a predictor most of the measured answers and leaves the rest for a load test.

    python -m benchmarks.length_prediction.teach --instructions FILE --lengths CSV \\
        --predictor DIRECTORY --held-out held_out.jsonl

output_lengths.py writes CSV. A server with ``--length-prediction-dir DIRECTORY`` then knows what it
would know after a thousand jobs. ``fastserve bench --dataset held_out.jsonl`` sends prompts that it
has not learned: those that accuracy.py judges by.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastserve_backend.config_sections import SchedulerSection
from fastserve_backend.length_prediction.encoder import Encoder
from fastserve_backend.length_prediction.predictor import LengthPredictor

from benchmarks.length_prediction.instructions import (
    FIRST_HELD_OUT,
    part,
    read_instructions,
    read_lengths,
)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--instructions", type=Path, required=True, metavar="FILE")
    options.add_argument("--predictor", type=Path, required=True, metavar="DIRECTORY")
    options.add_argument("--held-out", type=Path, required=True, metavar="FILE")
    options.add_argument("--lengths", type=Path, required=True, metavar="CSV")
    args = options.parse_args()
    lengths = read_lengths(args.lengths)
    predictor = LengthPredictor(Encoder(), SchedulerSection().length_prediction_capacity)
    held_out = []
    for one in read_instructions(args.instructions):
        if one.sha256 not in lengths:
            continue
        if part(one.sha256) >= FIRST_HELD_OUT:
            held_out.append({"instruction": one.prompt, "output": one.answer})
        else:
            predictor.learn(predictor.embed(one.prompt), lengths[one.sha256])
    args.predictor.mkdir(parents=True, exist_ok=True)
    predictor.save(args.predictor)
    lines = [json.dumps(record) + "\n" for record in held_out]
    args.held_out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(predictor)} jobs learned, {len(held_out)} held out")


if __name__ == "__main__":
    main()
