"""Distributions made on the spot: real metadata on a real path, found by importlib.metadata as any other."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PLATFORM = """
from anytron import Platform, hookimpl
from anytron.device.platform import Availability, Probe

class Chip(Platform):
    name = {name!r}
    api_version = 1
    accelerator = {accelerator}
    def probe(self):
        return Probe(Availability({availability!r}), {reason!r}, {remedy!r}, devices=1)
    def runtime(self):
        raise NotImplementedError
{body}
"""


class Site:
    """A directory on ``sys.path`` that distributions are put into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modules: list[str] = []

    def install(self, distribution: str, source: str, *, entry_points: str, version: str = "1.0") -> None:
        """Put one module (named as the distribution, with underscores) and its metadata there."""
        module = distribution.replace("-", "_")
        self.modules.append(module)
        (self.path / f"{module}.py").write_text(source)
        info = self.path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()

    def platform(
        self,
        name: str,
        availability: str = "usable",
        *,
        accelerator: bool = True,
        reason: str = "looked",
        remedy: str = "",
        body: str = "",
        distribution: str = "",
    ) -> None:
        """Install a platform whose probe answers what is given; ``body`` is more of its class."""
        distribution = distribution or f"acme-{name}"
        source = PLATFORM.format(
            name=name, accelerator=accelerator, availability=availability, reason=reason, remedy=remedy, body=body
        )
        module = distribution.replace("-", "_")
        self.install(distribution, source, entry_points=f"[anytron.platforms]\n{name} = {module}:Chip\n")

    def extension(self, name: str, source: str, target: str = "", *, distribution: str = "") -> None:
        """Install an extension: a module, or ``target`` in it."""
        distribution = distribution or f"acme-{name}"
        module = distribution.replace("-", "_")
        value = f"{module}:{target}" if target else module
        self.install(distribution, source, entry_points=f"[anytron.plugins]\n{name} = {value}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty site; beside it only the cpu platform is installed and enabled."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    for variable in ("ANYTRON_PLATFORM", "ANYTRON_PLATFORM_OPTIONS", "ANYTRON_PLUGINS", "ANYTRON_TRACE_HOOKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron")
    found = Site(directory)
    yield found
    for module in found.modules:
        sys.modules.pop(module, None)


@pytest.fixture
def report(site: Site):
    """The report of one plugin, by name (the first, where several have it)."""
    from anytron.device.loading import survey_plugins

    return lambda name: next(one for one in survey_plugins().reports if one.name == name)
