"""The site's table of contents has every page; that it builds, and loads nothing from elsewhere, is `tox -e docs`."""

from __future__ import annotations

import re

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


def reached(start):
    """The files to which links lead from a page, through other pages of the repository."""
    found, ahead = {start}, [start]
    while ahead:
        page = ahead.pop()
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            other = (page.parent / target).resolve()
            if other.is_file() and other not in found:
                found.add(other)
                ahead.append(other)
    return found


def test_links_lead_from_the_readme_to_every_page():
    """Whoever reads the repository has no table of contents beside the page."""
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(map(str, pages - reached(ROOT / "README.md"))) == []


def test_a_page_to_which_no_link_leads_is_noticed(tmp_path):
    (tmp_path / "first.md").write_text("[second](second.md#part), [site](https://example.org/third.md)")
    (tmp_path / "second.md").write_text("[back](first.md)")
    (tmp_path / "third.md").write_text("")
    assert reached(tmp_path / "first.md") == {tmp_path / "first.md", tmp_path / "second.md"}


def test_the_first_impression_is_short():
    readme, first = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/index.md"))
    assert len(readme.splitlines()) <= 60
    assert len(re.findall(r"(?<!!)\[[^]]*\]\(", readme)) <= 5
    (tasks,) = re.findall(r"^\| task \|.*?\n\|[-|]+\|\n((?:\|.*\n)+)", first, re.MULTILINE)
    assert len(tasks.splitlines()) == 8


def test_nothing_is_fetched_and_every_warning_counts():
    assert SITE["theme"]["font"] is False
    assert SITE["extra"]["polyfills"] == ["assets/iframe-worker.js"]
    assert set(SITE["validation"]["links"].values()) == {"warn"}
