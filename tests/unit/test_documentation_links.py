"""Links in the documentation lead to existing files and headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "perf_analyzer_configs/**/*.md", ".github/**/*.md")
    for page in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub makes of headings: lower case, hyphens for spaces, no punctuation."""
    titles = (title.strip().lower() for title in _HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    links = (link.partition("#")[0] for link in _LINK.findall(prose(index)))
    listed = {(index.parent / link).resolve() for link in links}
    pages = set((ROOT / "docs").glob("*.md")) - {index}
    assert pages <= listed, sorted(page.name for page in pages - listed)


def test_every_page_opens_with_what_it_is_for() -> None:
    for page in (ROOT / "docs").glob("**/*.md"):
        title, empty, first = page.read_text(encoding="utf-8").split("\n", 3)[:3]
        assert title.startswith("# ")
        assert not empty
        assert re.match(r"[\w`*]", first), f"{page}: begin with a sentence, not {first!r}"
