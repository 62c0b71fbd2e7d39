"""A fitted model of iteration times, and its file.

``prefill = a + b·n + c·n²`` over the prompt's length; ``decode = a + b·B + c·Σcontext`` over the
jobs of the batch. The scheduler asks it for the time of a job's next iteration (FastServe §4.1:
the job profiler).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Times of a real machine are positive; a fit through noise may not be, and a zero quantum breaks
# the queues.
MIN_ITERATION_S = 1e-6
_FORMAT = 1

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillSample:
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    batch_size: int
    context_tokens: int
    """Sum over the batch."""
    seconds: float


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """Coefficients in seconds, seconds a token, seconds a token squared; seconds a job."""

    key: str
    """Model, hardware, types and layout that it was measured on."""
    prefill_base_s: float
    prefill_token_s: float
    prefill_token2_s: float
    decode_base_s: float
    decode_job_s: float
    decode_context_s: float

    def prefill_s(self, num_tokens: int) -> float:
        """Time of an iteration that runs one prompt of ``num_tokens`` tokens alone."""
        n = float(num_tokens)
        value = self.prefill_base_s + self.prefill_token_s * n + self.prefill_token2_s * n * n
        return max(MIN_ITERATION_S, value)

    def decode_s(self, context_tokens: int) -> float:
        """Time of an iteration that decodes one job with this context alone."""
        value = self.decode_base_s + self.decode_job_s + self.decode_context_s * context_tokens
        return max(MIN_ITERATION_S, value)

    def save(self, path: Path) -> None:
        """Atomically, so that a reader never sees half a file."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT} | asdict(self), file, indent=2)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path, key: str) -> LatencyProfile | None:
        """The profile in ``path`` if it is readable and was measured for ``key``, else None."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != _FORMAT or values["key"] != key:
                return None
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def fit(
    key: str, prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]
) -> LatencyProfile:
    """Least squares on relative errors; negative coefficients are set to zero and refitted.

    Raises:
        ValueError: fewer than three samples of either kind.
    """
    if len(prefills) < 3 or len(decodes) < 3:
        raise ValueError(f"need 3 samples of each kind: {len(prefills)}, {len(decodes)}")
    tokens = np.array([sample.num_tokens for sample in prefills], dtype=np.float64)
    prefill = _fit_nonnegative(
        np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1),
        np.array([sample.seconds for sample in prefills]),
    )
    batch = np.array([sample.batch_size for sample in decodes], dtype=np.float64)
    context = np.array([sample.context_tokens for sample in decodes], dtype=np.float64)
    decode = _fit_nonnegative(
        np.stack([np.ones_like(batch), batch, context], axis=1),
        np.array([sample.seconds for sample in decodes]),
    )
    return LatencyProfile(key, *prefill, *decode)


def _fit_nonnegative(features: Floats, seconds: Floats) -> list[float]:
    # Dividing each row by its time makes the residuals relative: a 5 ms iteration counts as much as
    # a 500 ms one.
    weighted = features / seconds[:, None]
    active = list(range(features.shape[1]))
    result = [0.0] * features.shape[1]
    while active:
        solution = np.linalg.lstsq(weighted[:, active], np.ones_like(seconds), rcond=None)[0]
        if (solution >= 0).all():
            for column, value in zip(active, solution, strict=True):
                result[column] = float(value)
            break
        del active[int(np.argmin(solution))]
    return result
