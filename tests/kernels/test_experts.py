from __future__ import annotations

import pytest
import torch
from case_shapes import but_dtype
from experts_cases import Mixture, cases, choices_of
from fastserve_kernels import ops
from fastserve_kernels.cpu import plain_torch
from kernel_cases import Case

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
        linear.load(expert, torch.randn(70, 2048))
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
        linear.load(expert, torch.randn(40, 64))
    linear.load(1, torch.full((40, 64), float("nan")))
    starts = torch.tensor([0, 2, 2, 2, 5], dtype=torch.int32)
    assert linear(torch.randn(5, 64), starts).isfinite().all()


def test_sums_of_plain_torch_have_no_part_of_other_ranks_rows() -> None:
    routes = plain_torch.sort_choices(torch.tensor([[0, 5], [4, 5]]), 4, 1)
    y = torch.tensor([[2.0], [float("nan")], [float("nan")], [float("nan")]])
    sums = plain_torch.sum_choices(y, torch.tensor([[0.5, 0.5], [0.25, 0.75]]), routes)
    assert sums.tolist() == [[0.0], [0.5]]
