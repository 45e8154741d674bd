"""A folder on ``sys.path``, in this process and in those that it starts, in which tests install what is broken."""

import sys

import pytest

from anytron.proof.doctor.subject import look


class Site:
    """Installs modules and distributions as pip leaves them."""

    def __init__(self, path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def module(self, name, source=""):
        """A package, its parents without ``__init__.py``."""
        folder = self.path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source)
        return folder / "__init__.py"

    def distribution(self, name, version, *lines, entry_points=""):
        """Metadata of a distribution."""
        folder = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]
        (folder / "METADATA").write_text("\n".join(metadata) + "\n")
        if entry_points:
            (folder / "entry_points.txt").write_text(entry_points)

    def extension(self, name, source):
        """A plugin: the source of a module whose class ``Plugin`` has the hooks."""
        (self.path / f"{name}.py").write_text(source)
        self.distribution(name, "1.0", entry_points=f"[anytron.plugins]\n{name} = {name}:Plugin\n")


@pytest.fixture
def make_site(tmp_path, monkeypatch):
    """Make folders that come first on ``sys.path``."""
    before = set(sys.modules)

    def make(name="site"):
        site = Site(tmp_path / name)
        monkeypatch.syspath_prepend(str(site.path))
        return site

    yield make
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def site(make_site):
    """One such folder."""
    return make_site()


@pytest.fixture
def subject(monkeypatch):
    """This machine, without a configuration."""
    for name in ("ANYTRON_PLUGINS", "ANYTRON_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    return look(None, ())


def by_name(entries):
    """Entries by name, each name once."""
    entries = list(entries)
    found = {entry.name: entry for entry in entries}
    assert len(found) == len(entries), [entry.name for entry in entries]
    return found
