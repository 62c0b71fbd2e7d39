"""The latency profile: a fitted model of iteration times, and its file."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from fastserve_backend.checkpoints.model_config import DType, ModelConfig
from fastserve_backend.config_sections import ParallelSection
from fastserve_backend.errors import ConfigError
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.system.atomic_file import write_atomically

# A fit through noise may predict zero or less, and a zero quantum would break the queues.
MIN_ITERATION_S = 1e-6
_FORMAT = 6

# Fields of a model's configuration that iteration times do not depend on, or that a profile has as
# fields of its own.
_NOT_SHAPE = frozenset(
    (
        "name",
        "directory",
        "load_format",
        "dtype",
        "stored_quantization",
        "max_model_len",
        "eos_token_ids",
        "eos_is_default",
    )
)


@dataclass(frozen=True)
class Identity:
    """Everything that iteration times depend on: model, hardware, and how they are set up."""

    model: str
    """The model's name when it was measured. Models of the same shape take the same time."""
    shape: Mapping[str, Any]
    """Number of layers, widths, and all else that describes the architecture."""
    hardware: str
    dtype: DType
    tensor_parallel_size: int
    pipeline_parallel_size: int
    block_size: int
    max_model_len: int
    """The longest job that was measured."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        *,
        hardware: str,
        dtype: DType,
        block_size: int,
        parallel: ParallelSection,
    ) -> Identity:
        """``hardware`` and ``dtype`` as the ranks report them."""
        return cls(
            model=model.name,
            shape=shape_of(model),
            hardware=hardware,
            dtype=dtype,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            block_size=block_size,
            max_model_len=model.max_model_len,
        )

    @property
    def unchosen_share(self) -> float:
        """The share of a mixture's experts that a token does not choose; 1 without experts."""
        experts = self.shape.get("experts")
        return 1.0 - experts["top_k"] / experts["count"] if experts else 1.0

    @property
    def key(self) -> str:
        """A hash that is equal for identities with equal iteration times."""
        values = asdict(self)
        del values["model"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def shape_of(model: ModelConfig) -> dict[str, Any]:
    """The part of a model's configuration that iteration times depend on."""
    shape = {key: value for key, value in asdict(model).items() if key not in _NOT_SHAPE}
    for key in ("quantization", "stored_weight_bytes"):
        if shape[key] is None:
            del shape[key]
    if model.kv_dtype == "same":
        del shape["kv_dtype"]
    plain: dict[str, Any] = json.loads(json.dumps(shape))  # to compare equal to a shape from a file
    return plain


@dataclass(frozen=True)
class Curve:
    """A piecewise linear function that is 0 at 0 and never falls. The last slope has no end."""

    knots: tuple[int, ...]
    """Where each slope begins, ascending; the first is 0."""
    slopes_s: tuple[float, ...]
    """Slopes in seconds a unit, >= 0; one for each knot."""

    def __post_init__(self) -> None:
        """Raises ValueError: knots or slopes are not as described."""
        ascending = all(a < b for a, b in zip(self.knots, self.knots[1:], strict=False))
        if not self.knots or self.knots[0] != 0 or not ascending:
            raise ValueError(f"knots must ascend from 0: {self.knots}")
        if len(self.slopes_s) != len(self.knots):
            raise ValueError(f"{len(self.knots)} knots but {len(self.slopes_s)} slopes")
        _check_coefficients(*self.slopes_s)
        values = [0.0]
        for index, slope_s in enumerate(self.slopes_s[:-1]):
            values.append(values[-1] + slope_s * (self.knots[index + 1] - self.knots[index]))
        object.__setattr__(self, "_values", values)

    def __call__(self, x: int) -> float:
        index = bisect_right(self.knots, x) - 1
        value: float = self._values[index]  # type: ignore[attr-defined]
        return value + self.slopes_s[index] * (x - self.knots[index])


@dataclass(frozen=True)
class LatencyProfile(LatencyModel):
    """``base + tokens(T) + sampled(R) + c1·Σ context + c2·Σ prefill pairs + c3·share(T)``.

    The curves bend where multiplying begins to take longer than reading the weights. A prompt of n
    tokens has about n²/2 pairs. Of a mixture of experts, T tokens read a share of the weights:
    ``share(T) = 1 - (1 - k/E)^T``, if each chooses k of E experts at random. No term falls, so
    predictions beyond the measured range stay sane.
    """

    identity: Identity
    num_blocks: int
    """KV blocks of the machine when it was measured."""
    link: Link
    """To the host, in the same measurement."""
    num_samples: int
    """Number of iterations that the fit is made from."""
    held_out_error: float | None
    """Mean of |predicted - measured| / measured over iterations that were not used for the fit;
    None if there were none."""
    base_s: float
    tokens: Curve
    """Time of the linear layers, by the number of tokens of all jobs."""
    sampled: Curve
    """Time of the LM head, by the number of jobs that get a token."""
    decode_context_s: float
    """Seconds for each position that a decoded token attends to."""
    prefill_pair_s: float
    """Seconds for each pair of a prompt's token and a position that it attends to."""
    experts_s: float = 0.0
    """Seconds to read all experts of a mixture."""
    scored_token_s: float = 0.0
    """Seconds for the log-probabilities of a prompt's token, beside the token."""
    max_seqs: int = 0
    """Most jobs in a measured batch."""
    max_prefill_tokens: int = 0
    """Tokens of the longest measured prefill."""
    busy: bool = False
    """Whether other processes used the machine meanwhile, or serving showed that the times are too
    long. Then the next start measures again."""

    def __post_init__(self) -> None:
        """Raises ValueError: a coefficient is negative or not finite."""
        _check_coefficients(
            self.base_s,
            self.decode_context_s,
            self.prefill_pair_s,
            self.experts_s,
            self.scored_token_s,
        )
        object.__setattr__(self, "_unchosen_share", self.identity.unchosen_share)
        object.__setattr__(self, "num_stages", self.identity.pipeline_parallel_size)

    def iteration_s(self, load: IterationLoad) -> float:
        unread: float = self._unchosen_share**load.num_tokens  # type: ignore[attr-defined]
        value = (
            self.base_s
            + self.experts_s * (1.0 - unread)
            + self.tokens(load.num_tokens)
            + self.sampled(load.num_sampled)
            + self.decode_context_s * load.decode_context
            + self.prefill_pair_s * load.prefill_pairs
        )
        return value if value > MIN_ITERATION_S else MIN_ITERATION_S

    def score_s(self, num_tokens: int) -> float:
        return self.scored_token_s * num_tokens

    def require(self, model: ModelConfig, parallel: ParallelSection, block_size: int) -> None:
        """Raises ConfigError: this was measured with another shape, ``parallel`` or block size."""
        wanted, measured = shape_of(model), self.identity.shape
        differing = sorted(
            key for key in {*wanted, *measured} if wanted.get(key) != measured.get(key)
        )
        if differing:
            if "quantization" in differing:
                of_profile = measured.get("quantization")
                raise ConfigError(
                    f"profile: was measured with quantization {of_profile}, not "
                    f"{model.quantization}; set model.quantization to that"
                )
            if "kv_dtype" in differing:
                raise ConfigError(
                    f"profile: was measured with device_dtype {measured.get('kv_dtype', 'same')}, "
                    f"not {model.kv_dtype}; set kv_cache.device_dtype to that"
                )
            first = differing[0]
            raise ConfigError(
                f"profile: got one of {self.identity.model!r} for {model.name!r}; {first} is "
                f"{measured.get(first)!r} there and {wanted.get(first)!r} here, run "
                f"'fastserve profile' for {model.name!r}"
            )
        for key in ("tensor_parallel_size", "pipeline_parallel_size"):
            wanted_size = getattr(parallel, key)
            if getattr(self.identity, key) != wanted_size:
                raise ConfigError(
                    f"profile: was measured with {key} {getattr(self.identity, key)}, not "
                    f"{wanted_size}; set parallel.{key} to that"
                )
        if block_size != self.identity.block_size:
            raise ConfigError(
                f"profile: was measured with block_size {self.identity.block_size}, not "
                f"{block_size}; set kv_cache.block_size to that"
            )

    def to_json(self) -> str:
        """The content of a file for ``load``."""
        return f"{json.dumps({'format': _FORMAT} | asdict(self), indent=2)}\n"

    def save(self, path: Path) -> None:
        """Write a file for ``load``, atomically: a reader never sees half of it. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, self.to_json().encode())

    @classmethod
    def load(cls, path: Path) -> LatencyProfile:
        """Read a profile.

        Raises:
            ConfigError: the file cannot be read, is damaged, or has another format.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"profile: cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"profile: {path} is not JSON: {error}") from None
        version = document.get("format") if isinstance(document, dict) else None
        if version != _FORMAT:
            raise ConfigError(
                f"profile: {path} has format {version!r}; this version reads {_FORMAT}, run "
                "'fastserve profile' again"
            )
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"profile: {path} is damaged ({error}); run 'fastserve profile' again"
            ) from None


def _check_coefficients(*values: float) -> None:
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"a coefficient must be a number of seconds, at least 0: {value}")
