"""Packages are checked by metadata, before anything is imported."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from anytron import hookimpl
from anytron.base.errors import PluginError
from anytron.device.hooks.types import Requirement
from anytron.device.loading import check_requirements, hooks_of
from anytron.device.loading.report import examine_requirements

if TYPE_CHECKING:
    from anytron.device.hooks.facade import Hooks


def _hooks(*needs: Requirement) -> Hooks:
    class Plugin:
        @hookimpl
        def requirements(self):
            return needs

    return hooks_of(extensions={"acme": Plugin()})


def test_what_fits_passes():
    assert check_requirements(_hooks(Requirement("pluggy", f"=={version('pluggy')}"), Requirement("pydantic"))) == []


def test_all_that_is_missing_or_unfitting_is_named_at_once():
    hooks = _hooks(Requirement("pluggy", ">=99"), Requirement("no-such-package", ">=1", "ask your administrator"))
    with pytest.raises(PluginError) as caught:
        check_requirements(hooks)
    assert f"needs pluggy>=99, {version('pluggy')} is installed" in caught.value.why
    assert "needs no-such-package>=1, it is not installed" in caught.value.why
    assert caught.value.fix == "pip install 'pluggy>=99'; ask your administrator"


def test_an_optional_one_is_reported_not_refused():
    unmet = check_requirements(_hooks(Requirement("no-such-package", optional=True)))
    assert [one.requirement.package for one in unmet] == ["no-such-package"]


def test_an_impossible_range_names_the_plugin():
    with pytest.raises(PluginError, match="'acme' gives an invalid version range"):
        check_requirements(_hooks(Requirement("pluggy", "at least 1")))


def _install(folder, name, version):
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_second_copy_on_the_path_is_found_and_the_first_one_counts(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    _install(first, "wares", "2.0")
    _install(second, "wares", "1.0")
    monkeypatch.syspath_prepend(str(second))
    monkeypatch.syspath_prepend(str(first))

    (finding,) = examine_requirements([("acme", Requirement("wares", ">=2"))])

    assert (finding.installed, finding.fits) == ("2.0", True)
    assert finding.locations == (str(first), str(second))
    assert finding.as_line() == f"wares>=2: 2.0 in {first}; AGAIN in {second}"


def test_a_copy_that_hides_the_fitting_one_does_not_fit(tmp_path, monkeypatch):
    _install(tmp_path / "old", "wares", "1.0")
    _install(tmp_path / "new", "wares", "2.0")
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    monkeypatch.syspath_prepend(str(tmp_path / "old"))
    with pytest.raises(PluginError, match=r"needs wares>=2, 1\.0 is installed"):
        check_requirements(_hooks(Requirement("wares", ">=2")))
