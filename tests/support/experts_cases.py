"""Cases of the kernels of a mixture's experts, for a CPU's implementations and a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import kernel_reference as reference
import torch
from fastserve_kernels import ops
from fastserve_kernels.quantized_weight import stacked
from fastserve_kernels.weight_quantization import rounded
from kernel_cases import DTYPES, NAN, Case, Comparison, near
from quantized_cases import LAYERS


@dataclass(frozen=True)
class Mixture:
    """Tokens with so many choices among `experts`, of which those in `present` are here."""

    tokens: int
    choices: int
    experts: int
    present: range

    def __str__(self) -> str:
        here = "" if len(self.present) == self.experts else f"_{self.present.start}"
        return f"{self.tokens}x{self.choices}of{self.experts}{here}"


def _all(tokens: int, choices: int, experts: int) -> Mixture:
    return Mixture(tokens, choices, experts, range(experts))


# Mixtures, out features, in features, what is special, and whether rows are named or in order: few
# and many rows an expert, sizes near tiles' and between.
LINEARS = [
    (_all(1, 2, 8), 64, 64, "bias", "named"), (_all(3, 3, 4), 40, 33, "int8", "named"),
    (Mixture(19, 2, 5, range(2, 5)), 70, 256, "none", "in order"),
    (Mixture(7, 1, 6, range(4, 5)), 16, 40, "int8", "in order"),
    (_all(60, 4, 6), 100, 130, "bias", "named"), (_all(5, 1, 1), 33, 96, "none", "named"),
    (_all(0, 2, 4), 64, 64, "bias", "named"), (_all(4, 2, 3), 40, 0, "bias", "in order"),
]  # fmt: skip
# Of `quantized_cases`: each with another kind of numbers, and one that stays in no few bits.
FEW_BITS = ("Q4_1 in parts", "Q4_0 of large numbers", "Q4_K in whole tiles", "Q6_K", "FP8 by row",
            "GPTQ in parts", "a mixture")  # fmt: skip
# Mixtures and elements of a row
SUMS = [
    (_all(1, 8, 64), 2500), (_all(17, 2, 8), 100), (Mixture(30, 4, 10, range(3, 6)), 1024),
    (_all(0, 2, 4), 64), (_all(3, 1, 3), 7),
]  # fmt: skip
SORTS = [
    _all(1, 8, 128), _all(1, 1, 1), _all(37, 2, 8), Mixture(50, 4, 32, range(16, 32)),
    Mixture(3, 2, 5, range(4, 5)), _all(0, 2, 4), _all(300, 8, 9),
]  # fmt: skip
ACTIVATIONS = [(1, 2880), (3, 7), (17, 1024), (0, 8)]


def cases(*, interpreted: bool = False) -> Iterator[Case]:
    """If ``interpreted``, products of bfloat16 are left out: Triton's interpreter gets them
    wrong."""
    for dtype in DTYPES:
        if not (interpreted and dtype == torch.bfloat16):
            for linear in LINEARS:
                yield Case("grouped_linear", (dtype, *linear), _grouped_linear)
            for layer in FEW_BITS:
                yield Case("grouped_linear", (dtype, layer), _grouped_few_bits)
        for sums in SUMS:
            yield Case("sum_choices", (dtype, *sums), _sum_choices)
        for shape in ACTIVATIONS:
            yield Case("clamped_swiglu", (dtype, *shape), _clamped_swiglu)
    for mixture in SORTS:
        yield Case("sort_choices", (torch.int64, mixture), _sort_choices)
    yield Case("clamped_swiglu", (), _swiglu_of_extremes, "extremes")


def choices_of(mixture: Mixture) -> torch.Tensor:
    """int64 [T, choices], distinct in each row. Low numbers are chosen more often."""
    odds = torch.linspace(1.0, 0.05, mixture.experts).expand(mixture.tokens, -1)
    if mixture.tokens == 0:
        return torch.empty(0, mixture.choices, dtype=torch.int64)
    return torch.multinomial(odds, mixture.choices)


def _routes(mixture: Mixture, device: torch.device) -> tuple[torch.Tensor, ops.Routes]:
    chosen = choices_of(mixture)
    present = mixture.present
    return chosen, ops.sort_choices(chosen.to(device), present.start, len(present))


def _sort_choices(
    dtype: torch.dtype, mixture: Mixture, device: torch.device
) -> Iterator[Comparison]:
    chosen, routes = _routes(mixture, device)
    found = routes.tokens, routes.starts, routes.places
    expected = reference.sort_choices(chosen, mixture.present.start, len(mixture.present))
    for what, one, other in zip(("tokens", "starts", "places"), found, expected, strict=True):
        # Choices of absent experts may be in any order.
        end = len(one) if what == "starts" else int(expected[1][-1])
        if what == "places":
            one, other = (torch.where(t < end, t, end) for t in (one.cpu(), other))
        else:
            one, other = one.cpu()[:end], other[:end]
        yield Comparison(what, one, other)


def _grouped_linear(
    dtype: torch.dtype, mixture: Mixture, out_features: int, in_features: int, kind: str,
    rows: str, device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    groups = len(mixture.present)
    weights = (torch.randn(groups, out_features, in_features) * 0.1).to(dtype)
    biases = torch.randn(groups, out_features).to(dtype) if kind == "bias" else None
    linear = ops.GroupedLinear(
        groups, out_features, in_features, bias=biases is not None, dtype=dtype, device=device,
        int8=kind == "int8",
    )  # fmt: skip
    for group, weight in enumerate(weights):
        linear.load(group, [weight], None if biases is None else biases[group])
    if kind == "int8":
        weights = torch.stack([rounded(weight) for weight in weights])
    _, routes = _routes(mixture, device)
    named = routes.tokens if rows == "named" else None
    count = mixture.tokens if rows == "named" else len(routes.tokens)
    wide = torch.full((count, in_features + 16), NAN, dtype=dtype)
    wide[:, :in_features] = torch.randn(count, in_features)
    expected = reference.grouped_linear(
        wide[:, :in_features], weights, biases, routes.starts.cpu(),
        None if named is None else named.cpu(),
    )  # fmt: skip
    y = linear(wide.to(device)[:, :in_features], routes.starts, named).cpu()
    end = int(routes.starts[-1].cpu())
    yield near("result", y[:end], expected[:end], dtype)


def _grouped_few_bits(dtype: torch.dtype, name: str, device: torch.device) -> Iterator[Comparison]:
    """With few rows a group, with many, and with so many that a GPU dequantizes the weights."""
    _, parts, size, _ = next(layer for layer in LAYERS if layer[0] == name)
    groups, out = 4, sum(count for _, count in parts)
    biases = torch.randn(groups, out).to(dtype)
    linear = ops.GroupedLinear(groups, out, size, bias=True, dtype=dtype, device=device)
    exact = []
    for group in range(groups):
        weights = [make(count, size) for make, count in parts]
        exact.append(stacked(weights, dtype, torch.device("cpu")))
        linear.load(group, weights, biases[group])
    for counts in ([1, 0, 0, 3], [0, 40, 0, 7], [0] * 4, [1000, 0, 30, 1]):
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        x, rows = torch.randn(50, size).to(dtype), torch.randint(50, (sum(counts),)).int()
        y = linear(x.to(device), starts.to(device), rows.to(device))
        expected = reference.grouped_linear(x, torch.stack(exact), biases, starts, rows)
        yield near(f"{counts} rows", y.cpu(), expected, dtype)


def _sum_choices(
    dtype: torch.dtype, mixture: Mixture, size: int, device: torch.device
) -> Iterator[Comparison]:
    chosen, routes = _routes(mixture, device)
    weights = torch.rand(chosen.shape)
    y = torch.randn(chosen.numel(), size).to(dtype)
    y[int(routes.starts[-1].cpu()) :] = NAN
    expected = reference.mixture(
        y, chosen - mixture.present.start, weights, routes.tokens.cpu(), routes.starts.cpu()
    )
    result = ops.sum_choices(y.to(device), weights.to(device), routes)
    yield near("sums", result.cpu(), expected, dtype)


def _clamped_swiglu(
    dtype: torch.dtype, rows: int, size: int, device: torch.device
) -> Iterator[Comparison]:
    wide = torch.full((rows, 2 * size + 16), NAN, dtype=dtype)
    wide[:, : 2 * size] = torch.randn(rows, 2 * size) * 5
    result = ops.clamped_swiglu(wide.to(device)[:, : 2 * size], 1.702, 7.0)
    expected = reference.clamped_swiglu(wide[:, : 2 * size], 1.702, 7.0)
    yield near("result", result.cpu(), expected, dtype)


def _swiglu_of_extremes(device: torch.device) -> Iterator[Comparison]:
    values = torch.tensor([-1e30, -80.0, -7.0, 0.0, 7.0, 80.0, 1e30, NAN])
    x = torch.cartesian_prod(values, values).t().reshape(1, -1)
    result = ops.clamped_swiglu(x.to(device), 1.702, 7.0)
    expected = reference.clamped_swiglu(x, 1.702, 7.0)
    yield near("result", result.cpu(), expected, torch.float32)
