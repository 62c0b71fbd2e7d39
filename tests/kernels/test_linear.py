from __future__ import annotations

from collections.abc import Callable

import kernel_reference as reference
import pytest
import torch
from fastserve_kernels.ops import Int8Linear, PackedLinear, set_cpu_backend
from torch import Tensor

Close = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(64, 64), (200, 96), (7, 33), (768, 3072)], ids=str)
def test_any_number_of_rows(
    backend: str, close: Close, size: tuple[int, int], dtype: torch.dtype, relu: bool
) -> None:
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype)
    linear = PackedLinear(weight, bias, relu)
    assert (linear.out_features, linear.in_features) == size
    for rows in (1, 2, 3, 5, 6, 7, 16, 32, 100, 0, 1):
        x = torch.randn(rows, size[1]).to(dtype)
        y = linear(x)
        assert y.is_contiguous()
        assert y.dtype == dtype
        close(y, reference.linear(x, weight, bias, relu))


def test_without_bias_and_with_strided_rows(backend: str, close: Close) -> None:
    weight = torch.randn(64, 80)[:, :48]
    x = torch.randn(9, 100)
    close(PackedLinear(weight)(x[:, :48]), reference.linear(x[:, :48], weight, None, False))
    close(
        PackedLinear(weight.T)(x[:, :64].clone()),
        reference.linear(x[:, :64], weight.T, None, False),
    )
    transposed = torch.randn(48, 9).T
    close(PackedLinear(weight)(transposed), reference.linear(transposed, weight, None, False))


def test_compiled_relu_lets_nan_through() -> None:
    set_cpu_backend("compiled")
    linear = PackedLinear(torch.ones(16, 16), None, relu=True)
    assert linear(torch.full((1, 16), float("nan"))).isnan().all()


def test_many_rows_of_a_wide_input(backend: str, close: Close) -> None:
    """There are more rows than one packed block holds."""
    weight, bias = torch.randn(40, 2048), torch.randn(40)
    x = torch.randn(150, 2048)
    close(PackedLinear(weight, bias)(x), reference.linear(x, weight, bias, False))


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_do_not_depend_on_the_batch(
    dtype: torch.dtype, kind: type[PackedLinear | Int8Linear]
) -> None:
    set_cpu_backend("compiled")
    linear = kind(torch.randn(100, 768).to(dtype), torch.randn(100).to(dtype))
    assert linear.path == "compiled"
    x = torch.randn(500, 768).to(dtype)  # more than one packed block
    together = linear(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 16, 17, 33, 400):
        assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[-rows:]), together[-rows:])
