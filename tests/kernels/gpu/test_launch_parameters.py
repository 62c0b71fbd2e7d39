from __future__ import annotations

from itertools import product

import pytest
from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.work_lists import SPLIT_TOKENS


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(8, 64), (64, 64), (80, 128), (96, 128), (256, 256)]
)
def test_padded_head_dim(head_dim: int, padded: int) -> None:
    assert launch_parameters.padded_head_dim(head_dim) == padded


def test_every_head_has_parameters() -> None:
    for head_dim, size, capability in product((64, 80, 128, 256), (2, 4), [(8, 0), (9, 0)]):
        for group, int8 in product((1, 4), (False, True)):
            parameters = launch_parameters.decode(head_dim, size, group, capability, int8)
            # All tiles of a split are full, except the last of a context.
            assert SPLIT_TOKENS % parameters.key_tile == 0
        plain, of_int8 = (
            launch_parameters.prefill(head_dim, size, capability, int8) for int8 in (False, True)
        )
        # Work lists are built without knowing the cache's format.
        assert plain.query_tile == of_int8.query_tile


@pytest.mark.parametrize(
    ("capability", "served_by"),
    [((8, 6), (8, 0)), ((8, 9), (8, 0)), ((10, 0), (9, 0)), ((10, 3), (9, 0)), ((12, 0), (8, 0))],
)
def test_other_architectures_use_the_newest_row_not_newer(
    capability: tuple[int, int], served_by: tuple[int, int]
) -> None:
    older, newer = ((launch_parameters.prefill(64, 2, c, int8=False)) for c in ((8, 0), (9, 0)))
    assert older != newer
    expected = launch_parameters.prefill(64, 2, served_by, int8=False)
    assert launch_parameters.prefill(64, 2, capability, int8=False) == expected
