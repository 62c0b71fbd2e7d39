"""The table of docs/models.md is the one that ``make docs`` writes."""

from __future__ import annotations

from models_page import PAGE, with_table


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run `make docs`"
