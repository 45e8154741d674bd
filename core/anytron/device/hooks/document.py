"""Write ``docs/reference/hooks.md`` from the hook specifications.

Run ``python -m anytron.device.hooks.document docs/reference/hooks.md`` after a change of the specifications; a test
fails if the page is not up to date.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.lazy import homes
from anytron.device.hooks import specs
from anytron.device.hooks.registry import specifications

if TYPE_CHECKING:
    from anytron.device.hooks.registry import HookSpec

_NOTICE = (
    "<!-- Generated from core/anytron/device/hooks/specs.py by "
    "python -m anytron.device.hooks.document docs/reference/hooks.md -->"
)


def render() -> str:
    """The whole page, as Markdown."""
    found = specifications()
    contents = [f"- [`{name}`](#{name})" for name in found]
    sections = [_section(hook) for hook in found.values()]
    introduction = _markdown(inspect.getdoc(specs) or "")
    return "\n".join([_NOTICE, "", "# Hooks", "", introduction, "", *contents, "", *sections]).rstrip() + "\n"


def _section(hook: HookSpec) -> str:
    signature = inspect.signature(hook.function)
    arguments = [f"{one.name}: {one.annotation}" for one in signature.parameters.values()]
    heading = f"{hook.name}({', '.join(arguments)}) -> {signature.return_annotation}"
    text = _markdown(inspect.getdoc(hook.function) or "")
    links = ", ".join(f"[`{name}`](api.md#{name.lower()})" for name in types_of(hook))
    types = f"\n**Types:** {links}\n" if links else ""
    return f"## {hook.name}\n\n```python\n{heading}\n```\n\n**Kind:** {hook.kind}\n\n{text}\n{types}"


def types_of(hook: HookSpec) -> list[str]:
    """Return the names of Anytron's own types in the annotations of a hook, in order of appearance."""
    ours = {name for name, (module, _) in homes(Path(specs.__file__)).items() if module.startswith("anytron.")}
    words = re.findall(r"\w+", " ".join(map(str, hook.function.__annotations__.values())))
    return [name for name in dict.fromkeys(words) if name in ours]


def _markdown(text: str) -> str:
    """Turn reStructuredText roles, double backquotes and the leading words of paragraphs into Markdown."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    return re.sub(r"^(Called|Arguments|Returns):", r"**\1:**", text, flags=re.MULTILINE)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
