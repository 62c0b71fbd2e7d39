"""Loads a data set by a string: a packaged one, equal jobs, or a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from fastserve_client.errors import WorkloadError

from fastserve_bench.workload.csv_files import read_csv_lengths
from fastserve_bench.workload.lengths import NO_LIMITS, LengthLimits, Lengths, scale_lengths
from fastserve_bench.workload.mixes import MIXES
from fastserve_bench.workload.mooncake import is_mooncake, read_mooncake
from fastserve_bench.workload.synthetic import SYNTHETIC_DATASETS, synthetic_lengths
from fastserve_bench.workload.text_files import read_text_lengths

_ALLOWED = f"{', '.join((*SYNTHETIC_DATASETS, *MIXES))}, equal:PROMPT:OUTPUT or the path of a file"


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a data set: lengths, and texts, timestamps or classes if it has them."""

    lengths: Lengths
    timestamps_s: Sequence[float] | None = None
    prompts: Sequence[str] | None = None
    classes: Sequence[str] | None = None
    """Names, which are empty for jobs without a class."""

    def only(self, kept: Sequence[int]) -> Jobs:
        return Jobs(
            [self.lengths[i] for i in kept],
            None if self.timestamps_s is None else [self.timestamps_s[i] for i in kept],
            None if self.prompts is None else [self.prompts[i] for i in kept],
            None if self.classes is None else [self.classes[i] for i in kept],
        )


def load_lengths(dataset: str, limits: LengthLimits = NO_LIMITS, scale: float = 1.0) -> Lengths:
    """The lengths of a data set's jobs, without jobs over the limits.

    Args:
        dataset: one of :mod:`.synthetic`, ``equal:PROMPT:OUTPUT``, or a path. A file's content
            decides its format: CSV with the columns ``prompt_tokens,output_tokens``, a trace
            (Azure's or BurstGPT's CSV, Mooncake's JSON Lines), or JSON of ShareGPT or Alpaca.
        scale: Multiplies all lengths, before the limits.

    Raises:
        WorkloadError: no such data set, a malformed file, or no job within the limits.
    """
    return load_jobs(dataset, limits, scale).lengths


def load_jobs(dataset: str, limits: LengthLimits, scale: float) -> Jobs:
    """Like :func:`load_lengths`, with texts and timestamps."""
    jobs = _load_all(dataset)
    _check_order(dataset, jobs.timestamps_s)
    if scale != 1.0:
        jobs = replace(jobs, lengths=scale_lengths(jobs.lengths, scale))
    kept = [i for i, length in enumerate(jobs.lengths) if limits.allow(*length)]
    if not kept:
        raise WorkloadError(
            f"dataset: got {dataset!r}, which has {len(jobs.lengths)} jobs and none of them within "
            f"the limits (max_prompt_tokens {limits.max_prompt_tokens}, "
            f"max_total_tokens {limits.max_total_tokens}, "
            f"max_output_tokens {limits.max_output_tokens})"
        )
    return jobs.only(kept)


def _check_order(path: str, timestamps_s: Sequence[float] | None) -> None:
    for number, (earlier_s, later_s) in enumerate(pairwise(timestamps_s or ()), start=2):
        if later_s < earlier_s:
            raise WorkloadError(
                f"{path}: job {number}: its timestamp is {earlier_s - later_s:g} s before that of "
                "the job before it; sort the file by time"
            )


def _load_all(dataset: str) -> Jobs:
    if dataset in SYNTHETIC_DATASETS:
        return Jobs(synthetic_lengths(dataset))
    if dataset.startswith("equal:"):
        match = re.fullmatch(r"equal:([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", dataset)
        if not match:
            raise WorkloadError(
                f"dataset: got {dataset!r}; must be equal:PROMPT:OUTPUT with two positive integers"
            )
        return Jobs([(int(match[1]), int(match[2]))])
    text = _read(dataset)
    if not text:
        raise WorkloadError(f"{dataset}: got an empty file; must hold at least one job")
    if is_mooncake(text):
        lengths, timestamps_s, classes = read_mooncake(dataset, text)
        return Jobs(lengths, timestamps_s, classes=classes)
    if text.lstrip().startswith(("[", "{")):
        lengths, prompts, classes = read_text_lengths(dataset, text)
        return Jobs(lengths, prompts=prompts, classes=classes)
    lengths, csv_timestamps_s, classes = read_csv_lengths(dataset, text)
    return Jobs(lengths, csv_timestamps_s, classes=classes)


def _read(path: str) -> str:
    """The text of a file, up to its last character that is not blank."""
    try:
        # "sig" skips a byte order mark, with which spreadsheets begin UTF-8 files.
        return Path(path).read_text(encoding="utf-8-sig").rstrip()
    except OSError as error:
        raise WorkloadError(
            f"dataset: got {path!r} ({error.strerror}); must be {_ALLOWED}"
        ) from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: got bytes that are not UTF-8; must be a text file") from None
