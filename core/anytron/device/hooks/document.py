"""Write ``docs/reference/hooks.md`` from the hook specifications, and from the types that they name.

Run ``python -m anytron.device.hooks.document docs/reference/hooks.md`` after a change; a test compares.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.device.hooks import specs
from anytron.device.hooks.document_types import ELSEWHERE, describe_kernel, describe_type, reachable, types_in
from anytron.device.hooks.registry import specifications
from anytron.kernels.contract import KernelName

if TYPE_CHECKING:
    from anytron.device.hooks.document_types import Named
    from anytron.device.hooks.registry import HookSpec

_NOTICE = (
    "<!-- Generated from core/anytron/device/hooks/specs.py by "
    "python -m anytron.device.hooks.document docs/reference/hooks.md -->"
)
_KERNELS = """## Fused kernels

What `fused_kernel` is asked for, and how the answer is called: as the neutral default, the function of that name in
`anytron.kernels.fused`. Every kernel but `adam` is differentiable, in activations and in weights.
"""
_TYPES = """## Types

What hooks are given and answer, and what those types name in their turn. Classes with fields are frozen dataclasses:
`dataclasses.replace` makes a changed copy.
"""


def render() -> str:
    """The whole page, as Markdown."""
    found = specifications()
    contents = [f"- [`{name}`](#{name})" for name in found]
    contents += ["- [Fused kernels](#fused-kernels)", "- [Types](#types)"]
    sections = [_section(hook) for hook in found.values()]
    kernels = [describe_kernel(name) for name in KernelName]
    types = [describe_type(one) for one in reachable(one for hook in found.values() for one in _types(hook))]
    introduction = _markdown(inspect.getdoc(specs) or "")
    parts = [_NOTICE, "", "# Hooks", "", introduction, "", *contents, "", *sections, _KERNELS, *kernels, _TYPES, *types]
    return "\n".join(parts).rstrip() + "\n"


def _section(hook: HookSpec) -> str:
    signature = inspect.signature(hook.function)
    arguments = [f"{one.name}: {one.annotation}" for one in signature.parameters.values()]
    heading = f"{hook.name}({', '.join(arguments)}) -> {signature.return_annotation}"
    text = _markdown(inspect.getdoc(hook.function) or "")
    links = ", ".join(f"[`{one.name}`]({ELSEWHERE.get(one.name, f'#{one.name.lower()}')})" for one in _types(hook))
    types = f"\n**Types:** {links}\n" if links else ""
    return f"## {hook.name}\n\n```python\n{heading}\n```\n\n**Kind:** {hook.kind}\n\n{text}\n{types}"


def _types(hook: HookSpec) -> list[Named]:
    return types_in(map(str, hook.function.__annotations__.values()), specs)


def _markdown(text: str) -> str:
    """Turn reStructuredText roles, double backquotes and the leading words of paragraphs into Markdown."""
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    return re.sub(r"^(Called|Arguments|Returns):", r"**\1:**", text, flags=re.MULTILINE)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
