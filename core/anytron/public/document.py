"""Write ``docs/reference/api.md`` from the public modules.

Run ``python -m anytron.public.document docs/reference/api.md`` after a change; a test compares.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from anytron.device.platform import API_VERSION
from anytron.public import MODULES
from anytron.public.describe import Named, describe

HEADING = f"""# Public names

<!-- Generated from core/anytron/public and the modules that it lists, by
`python -m anytron.public.document docs/reference/api.md`. -->

What plugins and programs of others may import. Everything else is private and may change with every commit. Importing
one of these modules imports neither torch nor an engine: a name is imported from where it is defined when it is first
asked for. Classes with fields are frozen dataclasses: `dataclasses.replace` makes a changed copy.

## What a version promises

- **Names.** A public name, its arguments and its fields are deprecated for one minor release before they go: what 0.3
  deprecates works in 0.3, with a `DeprecationWarning` that names its successor, and may be gone in 0.4. A patch release
  removes and deprecates nothing.
- **Additions.** Every release may add names, optional arguments, fields with a default, members of enumerations, and
  hooks.
- **Platforms.** A platform says in `api_version` for which version of `Platform` and of the [hooks](hooks.md) it was
  written; this is version {API_VERSION}. The number grows when an existing platform would have to change. A platform of
  another version is refused by name before anything starts.
- **Processes of one run** have the same version of Anytron: a worker refuses a driver of another one.

## Modules

A platform needs `anytron`, and for its hooks `anytron.kernels` and `anytron.sequences`. A configuration names functions
and classes that need `anytron.tasks`. A program with its own trainer needs `anytron.train` and `anytron_megatron`. The
other modules are for plugins that bring an engine or a whole framework.
"""


def render() -> str:
    """The whole page, as Markdown."""
    contents = ["| module | for |", "|---|---|"]
    contents += [f"| [`{module}`](#{_anchor(module)}) | {purpose} |" for module, purpose in MODULES.items()]
    sections = [part for module, purpose in MODULES.items() for part in _section(module, purpose)]
    return _linked("\n".join([HEADING, *contents, "", *sections]).rstrip() + "\n")


def names(module: str) -> list[Named]:
    """The public names of a module."""
    return [Named(name, module) for name in importlib.import_module(module).__all__]


def _section(module: str, purpose: str) -> list[str]:
    found = names(module)
    listed = ", ".join(f"[`{one.name}`](#{one.name.lower()})" for one in found)
    return [f"## {module}", "", f"{purpose}: {listed}.", "", *map(describe, found)]


def _linked(page: str) -> str:
    """Link what docstrings say of a public name, by the place of its definition, to the name's own section."""
    known = {one.name for module in MODULES for one in names(module)}

    def link(found: re.Match[str]) -> str:
        is_name = found[1] in known and found[0].strip("`") not in MODULES
        return f"[`{found[1]}`](#{found[1].lower()})" if is_name else found[0]

    return re.sub(r"`anytron\w*(?:\.\w+)+\.(\w+)`", link, page)


def _anchor(heading: str) -> str:
    return heading.replace(".", "").lower()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
