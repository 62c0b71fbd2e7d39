"""The tables of docs/configuration.md are those that ``make docs`` writes."""

from __future__ import annotations

import pytest
from configuration_page import PAGE, with_tables


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run `make docs`"


def test_a_section_without_a_table_is_noticed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="scheduler"):
        with_tables(text.replace("<!-- table: scheduler -->", ""))
