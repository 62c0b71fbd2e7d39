"""How well output lengths are predicted, and how fast (ALISE's Table 2).

    python -m benchmarks.length_prediction.accuracy --instructions FILE --lengths CSV

FILE is output_lengths.py's, and CSV what it writes. Two lengths are predicted for each prompt: that
of the answer in FILE, in tokens of the embedded model, and that of the model's own answer. A hash
divides the prompts: 6 parts to learn from, 2 to choose settings by, 2 to judge by. The predictor
learns one job after the other, and is judged on parts that it has not learned: it learns 8 parts
and is judged on 2, or with --validation it learns 6 and is judged on the 2 for settings. --errors
writes real and predicted lengths of the model's own answers, without text.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

import numpy as np
import torch
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.tokenizer import load_tokenizer
from fastserve_backend.length_prediction.encoder import Embedding, Encoder
from fastserve_backend.length_prediction.past_jobs import Neighbours
from fastserve_backend.length_prediction.predictor import (
    MIN_SIMILARITY,
    NUM_NEIGHBOURS,
    LengthPredictor,
    median_length,
)

from benchmarks.length_prediction.instructions import (
    FIRST_HELD_OUT,
    Instruction,
    part,
    read_instructions,
    read_lengths,
)
from benchmarks.length_prediction.measures import Accuracy, Lengths, accuracy, bin_edges

_NUM_BINS = 5
_CAPACITY = 20_000
_CURVE = (0, 50, 100, 200, 400, 800, 1600, 3200, 6400)

Seconds = list[tuple[float, float]]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Job:
    prompt: str
    embedding: Embedding
    length: int


@dataclass(frozen=True)
class Parts:
    known: Sequence[Job]
    """Jobs that the predictor learns."""
    asked: Sequence[Job]
    """Jobs that the predictor is judged on."""

    @property
    def real(self) -> Lengths:
        return np.array([job.length for job in self.asked], dtype=np.float64)

    @property
    def edges(self) -> Lengths:
        return bin_edges(np.array([job.length for job in self.known]), _NUM_BINS)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--instructions", type=Path, required=True, metavar="FILE")
    options.add_argument("--lengths", type=Path, required=True, metavar="CSV")
    options.add_argument("--errors", type=Path, metavar="CSV", help="written (not at all)")
    options.add_argument("--validation", action="store_true", help="judge on the validation part")
    args = options.parse_args()
    torch.set_num_threads(1)
    instructions = sorted(read_instructions(args.instructions), key=lambda one: one.sha256)
    predictor = LengthPredictor(Encoder(), _CAPACITY)
    embeddings, seconds = _timed([one.prompt for one in instructions], predictor.embed)
    print(f"embedding a prompt: {_milliseconds(seconds)}")
    for title, lengths in (
        ("Answers of the data set", answer_lengths(instructions)),
        ("Answers of the model", read_lengths(args.lengths)),
    ):
        jobs = {
            one.sha256: Job(one.prompt, embedding, lengths[one.sha256])
            for one, embedding in zip(instructions, embeddings, strict=True)
            if one.sha256 in lengths
        }
        parts = _divided(jobs, args.validation)
        print(f"\n## {title}\n\n{len(parts.known)} jobs known, {len(parts.asked)} asked for\n")
        predicted = _report(parts)
        _report_learning(list(jobs.values()))
    if args.errors:
        _write_errors(args.errors, predicted, parts.real)


def answer_lengths(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Tokens of each answer, its end token among them, by the prompt's hash."""
    config = load_model_config(EMBEDDED_MODEL, dtype="float32", load_format="auto", device="cpu")
    tokenizer = load_tokenizer(EMBEDDED_MODEL, None, config)
    return {one.sha256: len(tokenizer.encode(one.answer)) + 1 for one in instructions}


def _divided(jobs: dict[str, Job], validation: bool) -> Parts:
    def of(first: int, end: int) -> list[Job]:
        return [job for sha256, job in jobs.items() if first <= part(sha256) < end]

    return (
        Parts(of(0, 6), of(6, FIRST_HELD_OUT))
        if validation
        else Parts(of(0, FIRST_HELD_OUT), of(FIRST_HELD_OUT, 10))
    )


def _report(parts: Parts) -> Lengths:
    """Prints how well each predictor does; returns the predictions of `LengthPredictor`."""
    lengths = np.array([job.length for job in parts.known], dtype=np.float64)
    predictor = LengthPredictor(Encoder(), _CAPACITY)
    _, learning = _timed(parts.known, lambda job: predictor.learn(job.embedding, job.length))
    predictions, predicting = _timed(parts.asked, lambda job: predictor.predict(job.embedding))
    predicted = np.array([one.num_tokens for one in predictions], dtype=np.float64)
    nearest = [predictor.jobs.nearest(job.embedding, NUM_NEIGHBOURS) for job in parts.asked]
    regressed = np.array([predictor.regressor.predict(job.embedding) for job in parts.asked])
    similar = np.array([one.similarities[0] >= MIN_SIMILARITY for one in nearest])
    print(Accuracy.HEADER)
    for name, some in {
        "always the mean": np.full(len(nearest), lengths.mean()),
        "always the median": np.full(len(nearest), np.median(lengths)),
        "regressor alone": regressed,
        "neighbours alone, mean": np.array([_mean_length(one) for one in nearest]),
        "neighbours alone, median": np.array([median_length(one) for one in nearest]),
        "ALISE's rule (mean, else regressor)": np.where(
            similar, [_mean_length(one) for one in nearest], regressed
        ),
        "**this predictor**": predicted,
    }.items():
        print(accuracy(some, parts.real, parts.edges).row(name))
    print(f"\nFrom neighbours: {similar.mean():.0%} of the predictions, else from the regressor")
    print(f"search and regressor: {_milliseconds(predicting)}; learning: {_milliseconds(learning)}")
    return predicted


def _mean_length(neighbours: Neighbours) -> float:
    """Mean weighted by similarity, as in ALISE."""
    return float(np.average(neighbours.lengths, weights=neighbours.similarities))


def _report_learning(jobs: Sequence[Job]) -> None:
    """Each job's length is predicted before it is learned."""
    predictor = LengthPredictor(Encoder(), _CAPACITY)
    real = np.array([job.length for job in jobs], dtype=np.float64)
    predicted = np.full(len(jobs), np.nan)
    for index, job in enumerate(jobs):
        num_tokens = predictor.predict(job.embedding).num_tokens
        predicted[index] = np.nan if num_tokens is None else num_tokens
        predictor.learn(job.embedding, job.length)
    print("\n| jobs learned | predicted | median error | log error |\n|---|---|---|---|")
    for begin, end in itertools.pairwise(_CURVE):
        known = np.flatnonzero(~np.isnan(predicted[begin:end])) + begin
        if len(jobs) > begin and len(known):
            off = np.abs(predicted[known] - real[known]) / real[known]
            log_off = np.abs(np.log(predicted[known] / real[known]))
            share = len(known) / len(real[begin:end])
            print(
                f"| {begin} to {end} | {share:.0%} | {np.median(off):.2f} | {log_off.mean():.2f} |"
            )


def _write_errors(path: Path, predicted: Lengths, real: Lengths) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("real_tokens", "predicted_tokens"))
        writer.writerows(zip(real.astype(int), predicted.astype(int), strict=True))


def _timed(
    items: Sequence[_Item], act: Callable[[_Item], _Result]
) -> tuple[list[_Result], Seconds]:
    """Results, and the seconds of each by the wall clock and by the processor."""
    results, seconds = [], []
    for item in items:
        wall, cpu = time.perf_counter(), time.thread_time()
        results.append(act(item))
        seconds.append((time.perf_counter() - wall, time.thread_time() - cpu))
    return results, seconds


def _milliseconds(seconds: Seconds) -> str:
    """Wall-clock and processor time; other load hardly changes the latter."""
    wall, cpu = (sorted(column) for column in zip(*seconds, strict=True))
    return (
        f"median {median(wall) * 1e3:.2f} ms, P95 {wall[int(0.95 * len(wall))] * 1e3:.2f} ms "
        f"(processor time: {median(cpu) * 1e3:.2f} ms, {1 / mean(cpu):.0f}/s)"
    )


if __name__ == "__main__":
    main()
