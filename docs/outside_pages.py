"""MkDocs hooks: pages of the repository that lie outside of ``docs/`` are part of the site, and links find their way.

A link to one of :data:`PAGES` leads to its page of the site. What is no page (sources, examples) is not on the site:
such a link becomes its text. The first page takes from the README what a comment ``from README`` names.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "README.md": "index.md",
    "benchmarks/RESULTS.md": "project/benchmarks.md",
    "plugins/ascend/simulator/README.md": "project/ascend-simulator.md",
}
"""Path in the repository -> path in the site."""

_ORIGIN = {target: origin for origin, target in PAGES.items() if origin != "README.md"}
_LINK = re.compile(r"(?<!!)\[((?:[^\]`]|`[^`]*`)+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FROM_README = re.compile(r"^<!-- from README: (\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside."""
    for target, origin in _ORIGIN.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / origin)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Put in what is quoted from the README, and lead links to pages of the site."""
    del config, files
    return lead_links(_FROM_README.sub(_quoted, markdown), page.file.src_uri)


def lead_links(markdown: str, page: str) -> str:
    """Rewrite the links of a page, whose path in the site is given.

    Raises:
        PluginError: A link leads to nothing.
    """
    origin = _ORIGIN.get(page, f"docs/{page}")

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if not (ROOT / path).exists():
            raise PluginError(f"{origin}: the link to {target} leads nowhere")
        there = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if there is None:
            return text
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{anchor})"

    return "".join(part if part.startswith("```") else _LINK.sub(led, part) for part in _split_code(markdown))


def _split_code(markdown: str) -> list[str]:
    """Fenced blocks, and what is between them."""
    return re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)


def _quoted(mark: re.Match[str]) -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^<!-- {mark[1]} -->\n(.*?)^<!-- end -->$", readme, re.DOTALL | re.MULTILINE)
    if found is None:
        raise PluginError(f"README.md has no part {mark[1]}")
    return found[1]
