"""Keep packages that teach torch another device out of a process."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anytron.device.platform import Platform

AUTOLOAD_GROUP = "torch.backends"
"""Entry points of the packages that torch would import by itself (torch/__init__.py, _import_device_backends)."""


def hide_foreign_devices(platforms: Iterable[Platform], active: Platform) -> tuple[str, ...]:
    """Make device packages of other platforms look as if they were not installed.

    Such a package changes torch as it is imported, or fails where its driver is missing, and
    transformers imports those that it can find (5.23 does so without a guard). So the names
    that torch would load by itself, and those that other platforms own, become None in
    ``sys.modules``: the import system then finds no module of that name ("The import system" in
    Python's reference, section 5.3.1). A package that was imported earlier stays.

    Args:
        platforms: All loaded platforms.
        active: The one of this process; its own packages become visible again.

    Returns:
        The names that are hidden, sorted.
    """
    modules = cast("dict[str, Any]", sys.modules)
    for name in active.device_packages:
        if name in modules and modules[name] is None:
            del modules[name]
    foreign = {point.module.partition(".")[0] for point in entry_points(group=AUTOLOAD_GROUP)}
    foreign |= {name for platform in platforms for name in platform.device_packages}
    for name in foreign - set(active.device_packages):
        if name not in modules and importlib.util.find_spec(name) is not None:
            modules[name] = None
    return tuple(sorted(name for name in foreign if modules.get(name, sys) is None))


def disable_device_autoload() -> None:
    """Keep ``import torch`` from importing device extensions by itself.

    With an extension installed whose driver is missing, the autoload makes ``import torch`` itself
    fail (torch/__init__.py, ``_import_device_backends``). The active platform loads its own device.
    What the user has set is kept. Call it before torch is imported; worker processes inherit it.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
