"""The site's table of contents has every page; that it builds, and loads nothing from elsewhere, is `tox -e docs`."""

from __future__ import annotations

import yaml

from tests.house import ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages_of(entries):
    for entry in entries:
        (value,) = [entry] if isinstance(entry, str) else entry.values()
        yield from pages_of(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_table_of_contents_once():
    listed = list(pages_of(SITE["nav"]))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(set(listed))
    assert there - set(listed) == set(), "name it in mkdocs.yml"
    assert {page for page in set(listed) - there if not page.startswith("project/")} == set()


def test_every_page_is_linked_from_the_first_one():
    first = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = [page for page in pages_of(SITE["nav"]) if not page.startswith("project/") and page != "index.md"]
    assert [page for page in pages if f"]({page})" not in first] == []


def test_nothing_is_fetched_and_every_warning_counts():
    assert SITE["theme"]["font"] is False
    assert SITE["extra"]["polyfills"] == ["assets/iframe-worker.js"]
    assert set(SITE["validation"]["links"].values()) == {"warn"}
