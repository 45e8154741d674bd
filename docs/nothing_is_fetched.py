"""MkDocs hook: refuse a site whose pages would load something from another machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s\"'>]+"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|prefetch|icon)\b)[^>]*\bhref=[\"']?(?:https?:)?//[^\s\"'>]+"
)
_LOADED_BY_STYLE = re.compile(r"(?:url\(|@import )\s*[\"']?(?:https?:)?//[^\s\"')]+")


def on_post_build(config: Any) -> None:
    """Look at every page and style sheet of the site.

    Raises:
        PluginError: One names an address elsewhere, other than in a link that a reader follows.
    """
    found = [
        f"{path.relative_to(config.site_dir)}: {match[0]}"
        for kind, pattern in (("*.html", _LOADED), ("*.css", _LOADED_BY_STYLE))
        for path in sorted(Path(config.site_dir).rglob(kind))
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError("the site would load from elsewhere:\n" + "\n".join(found))
