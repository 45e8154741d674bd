"""Which versions there are, and from where each module would be loaded."""

from __future__ import annotations

import platform as machine
import sys
from typing import TYPE_CHECKING

from anytron.base.components import Component
from anytron.base.results import Result
from anytron.proof.doctor.modules import installed, origin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.proof.doctor.subject import Subject

OF_EVERY_RUN = (
    Component("anytron", "anytron"),
    Component("torch", "torch"),
    Component("transformers", "transformers"),
    Component("pydantic", "pydantic"),
    Component("safetensors", "safetensors"),
)
"""Libraries of which every run is made, whatever its engines."""


def components(subject: Subject) -> list[Component]:
    """List the libraries of every run and those of the engines, each once."""
    own = [one for info in subject.engines().values() for one in info.components]
    return list(dict.fromkeys([*OF_EVERY_RUN, *own]))


def examine(subject: Subject) -> Iterator[Result]:
    """Give Python's version and that of each library, with the file that an import loads."""
    yield Result("versions.python", "passed", f"{machine.python_version()}, {sys.executable}, {machine.platform()}")
    for one in components(subject):
        name, found, place = f"versions.{one.distribution}", installed(one.distribution, one.module), origin(one.module)
        if found is None and place is None:
            yield Result(name, "skipped", "not installed")
        elif place is None:
            yield Result(
                name,
                "failed",
                f"{found and found.version} is installed, and there is no module {one.module} to import",
                f"pip install --force-reinstall --no-deps {one.distribution}",
            )
        elif found is None:
            yield Result(name, "passed", f"version unknown (no distribution of that name), loaded from {place}")
        else:
            version = found.version
            if one.distribution == "anytron" and version.endswith(".dev0"):
                version += ", of an unknown commit (it was built from a tree without git)"
            known_as = "" if found.name.lower().replace("_", "-") == one.distribution else f" of {found.name}"
            yield Result(name, "passed", f"{version}{known_as}, loaded from {place}")
