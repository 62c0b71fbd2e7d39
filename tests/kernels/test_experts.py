from __future__ import annotations

from itertools import pairwise

import kernel_reference as reference
import pytest
import torch
from case_shapes import but_dtype
from experts_cases import Mixture, cases, choices_of
from fastserve_kernels import ops
from fastserve_kernels.cpu import plain_torch
from fastserve_kernels.quantized_weight import QuantizedWeight
from fastserve_kernels.routing_rule import RoutingRule
from kernel_cases import Case
from quantized_cases import LAYERS
from torch import Tensor

CPU = torch.device("cpu")


@pytest.mark.one_of("case", key=but_dtype)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_case(backend: str, case: Case) -> None:
    for comparison in case.run(CPU):
        assert comparison.error <= comparison.limit, comparison.what


@pytest.mark.parametrize("present", [range(9), range(3), range(4, 9), range(8, 9)], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_choices_are_sorted_by_expert_and_then_by_token(
    backend: str, tokens: int, present: range
) -> None:
    chosen = choices_of(Mixture(tokens, 3, 9, present))
    routes = ops.sort_choices(chosen, present.start, len(present))
    bounds = routes.starts[:-1].tolist(), routes.starts[1:].tolist()
    for expert, start, end in zip(present, *bounds, strict=True):
        of_expert = (chosen == expert).nonzero()
        assert routes.tokens[start:end].tolist() == of_expert[:, 0].tolist()
        assert routes.places[chosen == expert].tolist() == list(range(start, end))
    rest = ~sum((chosen == expert for expert in present), torch.zeros(chosen.shape, dtype=bool))
    assert (routes.places[rest] >= routes.starts[-1]).all()
    assert sorted(routes.places.flatten().tolist()) == list(range(chosen.numel()))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_do_not_depend_on_the_batch(dtype: torch.dtype, int8: bool) -> None:
    """There are more rows than one packed block holds, and experts with many blocks of them."""
    ops.set_cpu_backend("compiled")
    linear = ops.GroupedLinear(6, 70, 2048, bias=False, dtype=dtype, device=CPU, int8=int8)
    assert linear.path == "compiled"
    for expert in range(6):
        linear.load(expert, [torch.randn(70, 2048)])
    x = torch.randn(300, 2048).to(dtype)
    chosen = choices_of(Mixture(300, 2, 6, range(6)))

    def choices(tokens: slice) -> torch.Tensor:
        """[T, choices, out]"""
        routes = ops.sort_choices(chosen[tokens], 0, 6)
        return linear(x[tokens], routes.starts, routes.tokens)[routes.places.long()]

    together = choices(slice(None))
    for tokens in (slice(0, 1), slice(1, 18), slice(200, 300)):
        assert torch.equal(choices(tokens), together[tokens])


def test_an_expert_without_rows_is_not_read() -> None:
    ops.set_cpu_backend("compiled")
    linear = ops.GroupedLinear(4, 40, 64, bias=False, dtype=torch.float32, device=CPU)
    for expert in (0, 3):
        linear.load(expert, [torch.randn(40, 64)])
    linear.load(1, [torch.full((40, 64), float("nan"))])
    starts = torch.tensor([0, 2, 2, 2, 5], dtype=torch.int32)
    assert linear(torch.randn(5, 64), starts).isfinite().all()


def dequantized(weights: list[QuantizedWeight | Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [
        one.dequantized(dtype) if isinstance(one, QuantizedWeight) else one.to(dtype)
        for one in weights
    ]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer[0])
def test_few_bits_give_the_results_of_dequantized_weights(
    backend: str, layer: tuple, dtype: torch.dtype, has_bias: bool
) -> None:
    """Bit for bit, for few and many rows a group, and groups without rows. One group is not
    quantized, so it has other panels. Where rows are rounded to 8 bits, results are those of the
    group's own linear."""
    _, parts, size, _ = layer
    out, groups = sum(count for _, count in parts), 6
    linear, exact = (
        ops.GroupedLinear(groups, out, size, bias=has_bias, dtype=dtype, device=CPU)
        for _ in range(2)
    )
    alone = []
    for group in range(groups):
        weights = [make(count, size) for make, count in parts]
        plain = dequantized(weights, dtype)
        bias = torch.randn(out).to(dtype) if has_bias else None
        is_plain = group == 2 or any(getattr(one, "order", None) is not None for one in weights)
        alone.append(
            ops.QuantizedLinear(plain if is_plain else weights, bias, dtype=dtype, device=CPU)
        )
        linear.load(group, plain if group == 2 else weights, bias)
        exact.load(group, plain, bias)
    x = torch.randn(60, size + 16).to(dtype)[:, :size]
    for counts in ([1, 0, 0, 0, 1, 0], [0, 2, 3, 0, 0, 4], [5, 0, 60, 17, 0, 3], [0] * 6):
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        rows = torch.randint(60, (sum(counts) + 2,), dtype=torch.int32)
        y, expected = linear(x, starts, rows), exact(x, starts, rows)
        for group, (start, end) in enumerate(pairwise(starts.tolist())):
            if alone[group].rounds_rows:
                expected[start:end] = alone[group](x[rows[start:end]])
            if backend == "compiled" and start < end:  # rows do not depend on the batch
                first = torch.where(starts <= start, 0, end - start).int().clamp(0, 1)
                assert torch.equal(linear(x, first, rows[start:end])[0], y[start])
        assert torch.equal(y[: sum(counts)], expected[: sum(counts)])


def test_few_bits_stay_in_memory() -> None:
    """In bytes for 256 weights."""
    ops.set_cpu_backend("compiled")
    sizes = {}
    for name, [(make, _), *_], _, _ in LAYERS:
        linear = ops.GroupedLinear(3, 64, 1536, bias=False, dtype=torch.bfloat16, device=CPU)
        for group in range(3):
            linear.load(group, [make(32, 1536), make(32, 1536)])
        sizes[name] = linear.nbytes / (3 * 64 * 1536) * 256
    assert sizes["Q4_1"] == 8 * 20
    assert sizes["Q4_0 of large numbers"] == 8 * 18
    assert sizes["Q8_0"] == 8 * 34
    # Numbers of 8 bits, and a step in float16 for each 4 of them.
    assert sizes["Q4_K in whole tiles"] == 128 + 16 + 8
    assert sizes["Q6_K"] == 192 + 16 + 8
    assert sizes["GPTQ in parts"] == 512  # groups have columns in orders of their own


@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "experts", "choices"), [(1, 64, 8), (300, 60, 4), (5, 3, 3), (4, 1, 1), (0, 8, 2)]
)
def test_choices_have_the_highest_scores(
    backend: str, tokens: int, experts: int, choices: int, dtype: torch.dtype, renormalises: bool
) -> None:
    ranks = torch.rand(tokens, experts).argsort(dim=1)
    wide = torch.full((tokens, experts + 7), 100).to(dtype)
    wide[:, :experts] = (ranks - 20) / 8  # distinct in all dtypes
    scores = wide[:, :experts]
    weights, chosen = ops.choose(scores, choices, RoutingRule(renormalises=renormalises))
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int64)
    assert weights.shape == chosen.shape == (tokens, choices)
    assert torch.equal(chosen, ranks.argsort(dim=1, descending=True)[:, :choices])
    best = scores.double().gather(1, chosen)
    among = best if renormalises else scores.double()
    expected = best.exp() / among.exp().sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_choices_among_equals_and_without_numbers() -> None:
    """They are distinct, the first of equal ones come first, and a NaN counts as the highest."""
    ops.set_cpu_backend("compiled")
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[1.0, 2, 2, 1], [nan, 3, nan, 4], [-inf] * 4, [0, inf, 1, inf]])
    weights, chosen = ops.choose(scores, 3, RoutingRule())
    assert chosen.tolist() == [[1, 2, 0], [0, 2, 3], [0, 1, 2], [1, 3, 2]]
    assert weights[0].tolist() == pytest.approx([0.422319, 0.422319, 0.155362], abs=1e-6)
    assert weights[1].isnan().all()


@pytest.mark.parametrize(
    ("rule", "has_bias"),
    [
        (RoutingRule(scoring="sigmoid", factor=2.5), True),
        (RoutingRule(scoring="sigmoid", renormalises=False), False),
        (RoutingRule(scoring="sigmoid", groups=4, chosen_groups=2, renormalises=False), True),
        (RoutingRule(groups=3, chosen_groups=2, renormalises=False), False),
        (RoutingRule(groups=12, chosen_groups=7, factor=0.5), True),
        (RoutingRule(), True),
        (RoutingRule(renormalises=False, margin=0.3), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [0, 60])
def test_rules_of_routers(backend: str, rule: RoutingRule, has_bias: bool, tokens: int) -> None:
    wide = torch.randn(tokens, 12 + 5)
    scores, bias = wide[:, :12], torch.randn(12) if has_bias else None
    weights, chosen = ops.choose(scores, 4, rule, bias)
    for token in range(tokens):
        expected = reference.routed(scores[token], 4, rule, bias)
        assert chosen[token].tolist() == list(expected)
        assert weights[token].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


def test_sums_of_plain_torch_have_no_part_of_other_ranks_rows() -> None:
    routes = plain_torch.sort_choices(torch.tensor([[0, 5], [4, 5]]), 4, 1)
    y = torch.tensor([[2.0], [float("nan")], [float("nan")], [float("nan")]])
    sums = plain_torch.sum_choices(y, torch.tensor([[0.5, 0.5], [0.25, 0.75]]), routes)
    assert sums.tolist() == [[0.0], [0.5]]
