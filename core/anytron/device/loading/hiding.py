"""Hide the packages that add other devices to torch: for Python's import system they are not installed.

Such a package changes torch as it is imported, or fails where its driver is missing, and transformers imports every one
that it can find (5.23 does so without a guard). A hidden package is None in ``sys.modules``: the import system then
finds no module of that name ("The import system" in Python's reference, section 5.3.1).
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from anytron.base.hidden import is_hidden

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from anytron.device.platform import Platform

AUTOLOAD_GROUP = "torch.backends"
"""Entry points of the packages that torch would import by itself (torch/__init__.py, _import_device_backends)."""


def hide_foreign_devices(platforms: Iterable[Platform], active: Platform) -> tuple[str, ...]:
    """Hide the packages that torch would load by itself, and the device packages of other platforms.

    A package that was imported earlier stays.

    Args:
        platforms: All loaded platforms.
        active: The platform of this process; its own packages become visible again.

    Returns:
        The names of the hidden packages, sorted.
    """
    _show(active.device_packages)
    foreign = set(autoloaded_packages())
    foreign |= {name for platform in platforms for name in platform.device_packages}
    for name in foreign - set(active.device_packages):
        if name not in sys.modules and importlib.util.find_spec(name) is not None:
            _modules()[name] = None
    return tuple(sorted(name for name in foreign if is_hidden(name)))


def autoloaded_packages() -> tuple[str, ...]:
    """Packages that torch would import by itself, sorted."""
    return tuple(sorted({point.module.partition(".")[0] for point in entry_points(group=AUTOLOAD_GROUP)}))


@contextlib.contextmanager
def own_packages_shown(platform: Platform) -> Iterator[None]:
    """Make a platform's own packages visible in the ``with`` block, in which it is probed.

    After the block, packages that were hidden before it are hidden again, unless the probe has imported them.
    """
    shown = _show(platform.device_packages)
    try:
        yield
    finally:
        for name in shown:
            _modules().setdefault(name, None)


def _show(names: Iterable[str]) -> list[str]:
    """Make hidden packages visible; return those that were hidden."""
    hidden = [name for name in dict.fromkeys(names) if is_hidden(name)]
    for name in hidden:
        del _modules()[name]
    return hidden


def _modules() -> dict[str, Any]:
    return cast("dict[str, Any]", sys.modules)
