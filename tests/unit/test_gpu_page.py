"""The tables of docs/gpu.md are those that ``make docs`` writes, and what they add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_page import GPU, PAGE, bounds, with_tables
from kernel_costs import Count

KERNEL = Count(
    kernel="k", registers=32, stack_bytes=0, shared_bytes=0, resident=1, programs=132, issue=1000,
    pipe="alu", tensor=200, alone=1500, moved_bytes=0, memory_bytes=3000, cache_bytes=5000,
)  # fmt: skip
ROUND = GPU(memory_rate=1e9, clock_hz=1e9, cache_rate=5e9)
"""A cycle takes a nanosecond."""


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run `make docs`"


def test_a_missing_table_is_noticed() -> None:
    with pytest.raises(ValueError, match="costs"):
        with_tables("<!-- table: times -->\n<!-- end -->\n")


def test_the_busiest_resource_takes_the_time() -> None:
    found = bounds([KERNEL], ROUND)
    assert found.least == pytest.approx(3e-6)  # memory
    assert found.in_turn == pytest.approx((1500 + 200 + 3000) * 1e-9)


def test_one_program_more_than_multiprocessors_takes_a_second_wave() -> None:
    more = replace(KERNEL, programs=133)
    assert bounds([more], ROUND).issue == pytest.approx(2e-6)
    assert bounds([more], ROUND).alone == pytest.approx(3e-6)
    both_at_once = replace(more, resident=2)
    assert bounds([both_at_once], ROUND).alone == pytest.approx(1.5e-6)


def test_kernels_of_a_launch_run_one_after_the_other() -> None:
    assert bounds([KERNEL, KERNEL], ROUND).alone == pytest.approx(3e-6)
