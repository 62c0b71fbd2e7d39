"""One string names a data set: packaged, made of equal jobs, or a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastserve_client.errors import WorkloadError
from fastserve_client.workload.csv_files import read_csv_lengths
from fastserve_client.workload.lengths import (
    NO_LIMITS,
    LengthLimits,
    Lengths,
    scale_lengths,
)
from fastserve_client.workload.synthetic import SYNTHETIC_DATASETS, synthetic_lengths
from fastserve_client.workload.text_files import read_text_lengths
from fastserve_client.workload.trace import (
    TraceJob,
    check_num_jobs,
    poisson_trace,
    timestamp_trace,
)

_ALLOWED = f"{', '.join(SYNTHETIC_DATASETS)}, equal:PROMPT:OUTPUT or the path of a file"


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The jobs of a data set, and what it knows of each besides its lengths."""

    lengths: Lengths
    timestamps_s: Sequence[float] | None = None
    prompts: Sequence[str] | None = None

    def only(self, kept: Sequence[int]) -> _Jobs:
        return _Jobs(
            [self.lengths[i] for i in kept],
            None if self.timestamps_s is None else [self.timestamps_s[i] for i in kept],
            None if self.prompts is None else [self.prompts[i] for i in kept],
        )


def load_lengths(dataset: str, limits: LengthLimits = NO_LIMITS, scale: float = 1.0) -> Lengths:
    """The job lengths of a data set, without those over the limits.

    Args:
        dataset: ``sharegpt`` or ``alpaca`` (synthetic, see :mod:`.synthetic`),
            ``equal:PROMPT:OUTPUT``, or a path. What a file is shows in its content: CSV with the
            columns ``prompt_tokens,output_tokens``, an Azure LLM inference trace, or JSON of
            ShareGPT or Alpaca.
        scale: All lengths times this, before the limits.

    Raises:
        WorkloadError: no such data set, a malformed file, or no job within the limits.
    """
    return _load(dataset, limits, scale).lengths


def build_trace(
    dataset: str,
    *,
    rate: float | None = None,
    num_jobs: int | None = None,
    seed: int = 0,
    limits: LengthLimits = NO_LIMITS,
    scale: float = 1.0,
) -> list[TraceJob]:
    """The trace of a load test, sorted by arrival.

    A data set with timestamps keeps them: ``rate`` then rescales them if it is given,
    ``num_jobs`` takes the first ones, and nothing is random. All others need both, and arrive as
    a Poisson process (see :func:`poisson_trace`).

    Args:
        dataset, limits, scale: As for :func:`load_lengths`.
        rate: Jobs per second.

    Raises:
        WorkloadError: as for :func:`load_lengths`, or a number missing or out of its range.
    """
    jobs = _load(dataset, limits, scale)
    timestamps_s = jobs.timestamps_s
    if timestamps_s is None:
        if rate is None:
            raise WorkloadError(
                f"rate: got none; {dataset} has no timestamps of its own, give --rates, or to "
                "bench --concurrency"
            )
        if num_jobs is None:
            raise WorkloadError(f"num_jobs: got none; {dataset} has no end of its own")
        return poisson_trace(jobs.lengths, rate, num_jobs, seed, jobs.prompts)
    if num_jobs is not None:
        check_num_jobs(num_jobs)
        if num_jobs > len(jobs.lengths):
            raise WorkloadError(
                f"num_jobs: got {num_jobs}; must be at most {len(jobs.lengths)}, "
                f"the jobs that {dataset} has within the limits"
            )
        in_order = sorted(range(len(jobs.lengths)), key=timestamps_s.__getitem__)
        jobs = jobs.only(in_order[:num_jobs])
        timestamps_s = [timestamps_s[i] for i in in_order[:num_jobs]]
    return timestamp_trace(timestamps_s, jobs.lengths, rate)


def _load(dataset: str, limits: LengthLimits, scale: float) -> _Jobs:
    jobs = _load_all(dataset)
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


def _load_all(dataset: str) -> _Jobs:
    if dataset in SYNTHETIC_DATASETS:
        return _Jobs(synthetic_lengths(dataset))
    if dataset.startswith("equal:"):
        match = re.fullmatch(r"equal:([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", dataset)
        if not match:
            raise WorkloadError(
                f"dataset: got {dataset!r}; must be equal:PROMPT:OUTPUT with two positive integers"
            )
        return _Jobs([(int(match[1]), int(match[2]))])
    text = _read(dataset)
    if not text:
        raise WorkloadError(f"{dataset}: got an empty file; must hold at least one job")
    if text.lstrip().startswith(("[", "{")):
        lengths, prompts = read_text_lengths(dataset, text)
        return _Jobs(lengths, prompts=prompts)
    return _Jobs(*read_csv_lengths(dataset, text))


def _read(path: str) -> str:
    """The text of a file, up to its last character that is not blank."""
    try:
        # With "sig": spreadsheets begin UTF-8 files with a byte order mark.
        return Path(path).read_text(encoding="utf-8-sig").rstrip()
    except OSError as error:
        raise WorkloadError(
            f"dataset: got {path!r} ({error.strerror}); must be {_ALLOWED}"
        ) from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: got bytes that are not UTF-8; must be a text file") from None
