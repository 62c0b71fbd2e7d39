"""Goals of the GPU engine, and whether a run's figures meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A bound on a figure of a table. Of all rows that match, the worst counts."""

    name: str
    table: str
    figure: str | tuple[str, ...]
    """Of several figures the worst counts, too."""
    must: float
    stretch: float
    where: Mapping[str, object]
    """Values that a row's case must have; a tuple allows any of its values."""
    at_most: bool = False
    """Bounds are the largest allowed values, not the smallest."""
    percent: bool = False
    """Whether it is written as a percentage."""

    def measured(self, rows: Iterable[Mapping[str, Any]]) -> float | None:
        """The worst value; None where there is none."""
        figures = (self.figure,) if isinstance(self.figure, str) else self.figure
        values = [
            row["figures"].get(figure)
            for row in rows
            if row["table"] == self.table and self._matches(row["case"])
            for figure in figures
        ]
        known = [value for value in values if value is not None]
        worst: Callable[[list[float]], float] = max if self.at_most else min
        return worst(known) if known else None

    def is_met_by(self, value: float) -> bool:
        return value <= self.must if self.at_most else value >= self.must

    def _matches(self, case: Mapping[str, object]) -> bool:
        return all(
            case[key] in (wanted if isinstance(wanted, tuple) else (wanted,))
            for key, wanted in self.where.items()
        )

    def evaluate(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The goal as it stands in a run's JSON."""
        value = self.measured(rows)
        return {
            "name": self.name,
            "at_most": self.at_most,
            "percent": self.percent,
            "must": self.must,
            "stretch": self.stretch,
            "measured": value,
            "met": None if value is None else self.is_met_by(value),
        }


def _decode(
    name: str, figure: str | tuple[str, ...], must: float, stretch: float, **keys: Any
) -> Goal:
    where = {"head dim": keys.pop("head_dim", (128, 64))}
    return Goal(name, "paged decode", figure, must, stretch, where, **keys)


def _linear(name: str, formats: tuple[str, ...], stretch: float) -> Goal:
    return Goal(f"linear with a weight of {name}, up to 16 rows, × as fast as in 16 bits",
                "linear with a quantized weight", "× as fast", 1.6, stretch,
                {"format": formats, "rows": (1, 16)})  # fmt: skip


GOALS = (
    _decode("paged decode, D 128, share of the read rate", "share of read rate", 0.80, 0.90,
            head_dim=128, percent=True),
    _decode("paged decode, D 64, share of the read rate", "share of read rate", 0.75, 0.85,
            head_dim=64, percent=True),
    _decode("paged decode, × as fast as gather + SDPA", "× gather + SDPA", 2.0, 3.0),
    Goal("paged decode, × as fast as compiled paged FlexAttention", "paged FlexAttention",
         "× paged Flex", 1.1, 1.3, {"head dim": (128, 64)}),
    _decode("paged decode, × as fast as the fastest SDPA on contiguous KV",
            ("× contiguous SDPA", "× contiguous SDPA, FLASH", "× contiguous SDPA, cuDNN"),
            0.9, 1.1),
    Goal("paged decode, × as fast as FlashInfer", "paged decode and FlashInfer", "× FlashInfer",
         1.0, 1.1, {"head dim": (128, 64)}),
    Goal("prefill of 2k tokens, D 128, TFLOP/s", "paged prefill", "TFLOP/s", 300, 420,
         {"head dim": 128}),
    Goal("prefill of 2k tokens, D 64, TFLOP/s", "paged prefill", "TFLOP/s", 200, 300,
         {"head dim": 64}),
    Goal("prefill of 2k tokens, × as fast as SDPA's FLASH", "paged prefill", "× SDPA, FLASH",
         1.0, 1.1, {"head dim": (128, 64)}),
    Goal("prefill of 2k tokens, × as fast as SDPA's cuDNN", "paged prefill", "× SDPA, cuDNN",
         0.75, 0.9, {"head dim": (128, 64)}),
    _linear("8 bits", ("Q6_K", "FP8, blocks of 128"), 1.8),
    _linear("4 bits", ("Q4_1", "4 bits, groups of 128", "Q4_K"), 3.0),
    Goal("linear with a weight of few bits, 64 rows, × as fast as in 16 bits",
         "linear with a quantized weight", "× as fast", 1.0, 1.5, {"rows": 64}),
    Goal("swap of 1 GB of OPT-13B blocks, one way, share of pinned copies", "swap",
         "share of pinned copy", 0.90, 0.95, {"direction": ("out", "in")}, percent=True),
    Goal("the same, both ways", "swap", "share of pinned copy", 0.80, 0.90,
         {"direction": "both"}, percent=True),
    Goal("decode slowdown while swapping", "decode while swapping", "slowdown", 0.08, 0.03, {},
         at_most=True, percent=True),
    Goal("whole decode step over its floor, OPT-13B", "decode step", "× floor", 1.22, 1.10,
         {"model": "opt-13b"}, at_most=True),
    Goal("step with a prompt, host's time over the GPU's", "step with a prompt", "host over GPU",
         0.70, 0.40, {}, at_most=True, percent=True),
    Goal("host gap between steps, batch 64, ms", "host gap", "ms", 0.5, 0.15, {}, at_most=True),
)  # fmt: skip
