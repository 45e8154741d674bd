"""Transformer Engine where it can be used, portable modules elsewhere; one that is named is never replaced silently."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packaging.version import Version

from anytron.base.errors import ConfigError, PlatformError

pytestmark = pytest.mark.usefixtures("plugin")

NONE, FINE = {}, {"version": Version("2.9.0")}
OLD, NEW = {"version": Version("1.13.0")}, {"version": Version("3.0.0")}
SOURCE = {"version": Version("2.10.0.dev0+c90a720")}
BROKEN = {**FINE, "broken": "ImportError: undefined symbol: _ZN3c104cuda"}


@pytest.mark.parametrize(
    ("wanted", "library", "value", "reason"),
    [
        ("auto", FINE, "transformer_engine", "version 2.9.0 is installed"),
        ("auto", SOURCE, "transformer_engine", "version 2.10.0.dev0+c90a720 is installed"),
        ("auto", NONE, "portable", "Transformer Engine is not installed"),
        ("auto", OLD, "portable", "Transformer Engine 1.13.0 is installed, but only >=2.0,<3 is supported"),
        ("auto", NEW, "portable", "Transformer Engine 3.0.0 is installed, but only >=2.0,<3 is supported"),
        ("auto", BROKEN, "portable", "Transformer Engine 2.9.0 is installed and cannot be imported: ImportError"),
        ("portable", FINE, "portable", "set by platform.options.modules"),
        ("portable", NONE, "portable", "set by platform.options.modules"),
        ("transformer_engine", FINE, "transformer_engine", "set by platform.options.modules; version 2.9.0"),
    ],
)
def test_what_is_chosen_and_why(wanted, library, value, reason):
    from anytron_cuda.modules import Library, choose_modules

    decision = choose_modules(wanted, Library(**library))
    assert (decision.name, decision.value) == ("modules", value)
    assert reason in decision.reason


@pytest.mark.parametrize("library", [NONE, OLD, NEW, BROKEN])
def test_one_that_is_named_and_cannot_be_used_is_an_error(library):
    from anytron_cuda.modules import Library, choose_modules

    with pytest.raises(ConfigError) as caught:
        choose_modules("transformer_engine", Library(**library))
    error = caught.value
    assert (error.what, error.where) == (
        "Transformer Engine cannot be used.",
        "platform.options.modules=transformer_engine",
    )
    assert error.why == Library(**library).obstacle
    again = "--no-deps --no-cache-dir --force-reinstall transformer-engine-torch==2.9.0;"
    assert (again if library is BROKEN else "--no-build-isolation 'anytron[cuda,te]';") in error.fix
    assert "platform.options.modules=portable" in error.fix


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a Transformer Engine, as far as its metadata and its import go."""

    def install(version: str, pytorch: str = "") -> None:
        package = tmp_path / "transformer_engine"
        (package / "pytorch").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "pytorch" / "__init__.py").write_text(pytorch)
        info = tmp_path / f"transformer_engine-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_what_is_not_installed_is_not_found():
    from anytron_cuda.modules import transformer_engine

    assert transformer_engine(imported=True).version is None


def test_its_metadata_is_enough_unless_the_import_is_asked_for(install):
    from anytron_cuda.modules import transformer_engine

    install("2.9.0", "raise ImportError('undefined symbol: _ZN3c104cuda')")
    assert transformer_engine(imported=False).obstacle == ""
    assert transformer_engine(imported=True).broken == "ImportError: undefined symbol: _ZN3c104cuda"
    assert "transformer_engine" not in sys.modules, "another process has tried"


def test_one_that_can_be_imported_is_fine(install):
    from anytron_cuda.modules import transformer_engine

    install("2.9.0")
    assert transformer_engine(imported=True).obstacle == ""


def test_an_unsupported_one_is_not_imported(install, monkeypatch):
    from anytron_cuda import modules

    install("1.13.0", "raise SystemExit(1)")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was tried"))
    assert modules.transformer_engine(imported=True).version == Version("1.13.0")


def test_a_training_rank_refuses_what_cannot_be_imported(install):
    from anytron_cuda.modules import import_transformer_engine

    install("2.9.0", "raise OSError('libcudart.so.12: cannot open shared object file')")
    with pytest.raises(PlatformError, match="Transformer Engine cannot be imported") as caught:
        import_transformer_engine()
    assert caught.value.why == "OSError: libcudart.so.12: cannot open shared object file"
    assert "--force-reinstall transformer-engine-torch==2.9.0;" in caught.value.fix


def test_a_training_rank_without_it_is_told_to_install_it(monkeypatch):
    from anytron_cuda import modules

    monkeypatch.setattr(modules, "PACKAGE", "missing_transformer_engine")
    monkeypatch.setattr(modules, "DISTRIBUTION", "missing-transformer-engine")
    with pytest.raises(PlatformError) as caught:
        modules.import_transformer_engine()
    assert "--no-build-isolation 'anytron[cuda,te]';" in caught.value.fix
