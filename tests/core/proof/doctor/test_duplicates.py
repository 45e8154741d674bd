"""What is there twice is found in folders that are really on ``sys.path``."""

import sys

import pytest

from anytron.base.components import Component
from anytron.proof.doctor import modules, packages
from anytron.proof.doctor.modules import copies, origin
from tests.core.proof.doctor.conftest import by_name


@pytest.fixture
def lib(monkeypatch):
    """A library of every run, for a test: ``acme-lib`` with the module ``acmelib.core`` in a namespace."""
    monkeypatch.setattr(modules, "EXAMINED", (Component("acme-lib", "acmelib.core"),))


def examined(subject):
    return by_name(entry for entry in packages.examine_duplicates(subject) if "acme" in entry.name)


def test_one_installation_is_in_order(subject, site, lib):
    site.module("acmelib.core")
    site.distribution("acme-lib", "1.0")
    assert examined(subject) == {}
    (entry,) = (one for one in modules.examine_versions(subject) if one.name == "versions.acme-lib")
    assert (entry.status, entry.detail) == ("passed", f"1.0, loaded from {site.path}/acmelib/core/__init__.py")


def test_an_anytron_whose_commit_nobody_knows_is_named(subject, site):
    site.distribution("anytron", "0.1.dev0")
    (entry,) = (one for one in modules.examine_versions(subject) if one.name == "versions.anytron")
    assert entry.detail.startswith(
        "0.1.dev0, of an unknown commit (it was built from a tree without git), loaded from "
    )


def test_a_distribution_that_is_installed_twice_fails_with_both_places(subject, make_site, lib):
    for name, version in (("old", "1.0"), ("new", "2.0")):
        folder = make_site(name)
        folder.module("acmelib.core")
        folder.distribution("acme-lib", version)
    found = examined(subject)
    twice = found["duplicates.acme-lib"]
    assert twice.status == "failed"
    assert "installed 2 times" in twice.detail
    assert all(part in twice.detail for part in ("1.0 in", "2.0 in", "/old", "/new"))
    assert "pip uninstall acme-lib" in twice.fix
    assert found["duplicates.acmelib.core"].status == "warning"
    assert "/new/acmelib/core/__init__.py; it hides" in found["duplicates.acmelib.core"].detail


def test_a_folder_that_is_listed_twice_is_one_place(subject, site, lib, monkeypatch, tmp_path):
    site.module("acmelib.core")
    site.distribution("acme-lib", "1.0")
    (tmp_path / "link").symlink_to(site.path)
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    monkeypatch.syspath_prepend(str(site.path))
    assert examined(subject) == {}


def test_a_package_that_an_installer_linked_is_in_order(subject, site, lib, tmp_path):
    """``uv pip install --link-mode symlink`` links packages from its cache."""
    site.module("acmelib.core")
    site.distribution("acme-lib", "1.0")
    (site.path / "acmelib").rename(tmp_path / "cached")
    (site.path / "acmelib").symlink_to(tmp_path / "cached")
    assert examined(subject) == {}


def test_a_checkout_before_an_installed_wheel_fails(subject, make_site, lib):
    """The version that pip knows is not that of the files which are imported."""
    wheel = make_site("wheel")
    wheel.module("acmelib.core")
    wheel.distribution("acme-lib", "1.0")
    checkout = make_site("checkout")
    file = checkout.module("acmelib.core")
    found = examined(subject)["duplicates.acmelib.core"]
    assert found.status == "failed"
    assert f"loaded from {file}, and acme-lib 1.0 is installed in {wheel.path}" in found.detail
    assert f"it hides {wheel.path}/acmelib/core/__init__.py" in found.detail
    assert "PYTHONPATH" in found.fix


def test_another_checkout_before_an_editable_one_is_a_warning(subject, make_site, lib, tmp_path):
    metadata = make_site("metadata")
    metadata.distribution("acme-lib", "1.0")
    (tmp_path / "first").mkdir()
    editable = f'{{"url": "file://{tmp_path}/first", "dir_info": {{"editable": true}}}}'
    (metadata.path / "acme_lib-1.0.dist-info/direct_url.json").write_text(editable)
    make_site("second").module("acmelib.core")
    assert examined(subject)["duplicates.acmelib.core"].status == "warning"


def test_megatron_from_elsewhere_is_named(subject, site):
    file = site.module("megatron.core")
    found = by_name(packages.examine_duplicates(subject))["duplicates.megatron.core"]
    assert found.status == "failed"
    assert str(file) in found.detail
    assert "megatron-core" in found.detail


def test_a_folder_with_a_packages_name_in_the_current_directory_is_a_warning(subject, site, lib, tmp_path, monkeypatch):
    site.module("acmelib.core")
    site.distribution("acme-lib", "1.0")
    here = tmp_path / "here"
    (here / "acmelib").mkdir(parents=True)
    monkeypatch.chdir(here)
    found = examined(subject)
    assert found["duplicates.acmelib"].status == "warning"
    assert str(here / "acmelib") in found["duplicates.acmelib"].detail
    monkeypatch.chdir(site.path)  # the package's own folder shadows nothing
    assert examined(subject) == {}


def test_nothing_is_imported_to_look(site):
    site.module("acmelib", "raise SystemExit('imported')")
    site.module("acmelib.core")
    assert origin("acmelib.core") == site.path / "acmelib/core/__init__.py"
    assert copies("acmelib.core") == [site.path / "acmelib/core/__init__.py"]
    assert origin("acmelib.missing") is None
    assert "acmelib" not in sys.modules
