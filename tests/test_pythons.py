"""``requires-python``, the pins of constraints/ and the pages say the same Pythons; and what tests/pythons.py finds."""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests import pythons
from tests.house import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

PROJECTS = [
    ROOT / "pyproject.toml",
    *(path for folder in ("core", "plugins", "examples") for path in sorted(ROOT.glob(f"{folder}/**/pyproject.toml"))),
]
CONSTRAINTS = sorted(ROOT.glob("constraints/*.txt"))
NARROWER = {"plugins/verl/pyproject.toml": ">=3.10,<3.13"}
"""The projects that run on fewer Pythons than the rest: verl 0.9.1 excludes 3.13."""


def test_all_projects_ask_for_the_same_python():
    (asked,) = re.findall(
        r'^requires-python = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    found = {
        str(path.relative_to(ROOT)): re.findall(
            r'^requires-python = "(.*)"', path.read_text(encoding="utf-8"), re.MULTILINE
        )
        for path in PROJECTS
    }
    assert len(found) == 10
    assert found == {name: [NARROWER.get(name, asked)] for name in found}


def test_the_checkers_the_classifiers_and_the_pages_name_the_same_pythons():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    supported = pythons.supported()
    first, last = supported[0], supported[-1]
    assert re.findall(r'"Programming Language :: Python :: (3\..*)"', settings) == supported
    assert f'target-version = "py{first.replace(".", "")}"' in settings  # ruff
    assert f'python_version = "{first}"' in settings  # mypy
    for page in ("README.md", "CONTRIBUTING.md", "docs/index.md"):
        assert f"Python {first} to {last}" in (ROOT / page).read_text(encoding="utf-8"), page


# ---- pins ---------------------------------------------------------------------------------------------


def pins(text: str) -> list[Requirement]:
    """Read the requirements of a file of constraints/."""
    lines = (re.split(r"(?:^|\s)(?:#|--hash)", line)[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def pythons_of(text: str) -> list[str]:
    """Give the Pythons that a file of constraints/ is for: those that its head names, else all."""
    said = re.search(r"^# For Python ([^\s:]*\d)", text, re.MULTILINE)
    asked = SpecifierSet(said[1] if said else "")
    return [python for python in pythons.supported() if f"{python}.0" in asked]


def applies(pin: Requirement, python: str) -> bool:
    """Whether a pin is one for a Python, such as ``3.10``."""
    return not pin.marker or pin.marker.evaluate({"python_version": python, "python_full_version": f"{python}.0"})


@cache
def asked_by_installed(pin: Requirement) -> str:
    """Give the ``Requires-Python`` of a pin, if that very version is installed here."""
    try:
        found = metadata.distribution(pin.name)
    except metadata.PackageNotFoundError:
        return ""
    return found.metadata.get("Requires-Python") or "" if str(pin.specifier) == f"=={found.version}" else ""


def excluded(text: str, asked: Callable[[Requirement], str] = asked_by_installed) -> list[str]:
    """Name the pins for a Python that their own ``Requires-Python`` excludes; 3.N.0 stands for 3.N."""
    return [
        f"{pin.name} on {python}"
        for pin in pins(text)
        for python in pythons_of(text)
        if applies(pin, python) and f"{python}.0" not in SpecifierSet(asked(pin))
    ]


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_each_pin_can_be_installed_on_each_python_of_its_file(path):
    text = path.read_text(encoding="utf-8")
    assert excluded(text) == []
    for python in pythons_of(text):
        times = Counter(pin.name for pin in pins(text) if applies(pin, python))
        assert set(times) == {pin.name for pin in pins(text)}, f"a package has no pin on {python}"
        assert {name for name, number in times.items() if number > 1} == set(), f"two pins on {python}"


def test_a_pin_without_its_marker_is_found():
    """The twin: constraints/cpu.txt as it was when nothing could be installed on 3.10."""
    text = (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8")
    known = [pin for pin in pins(text) if asked_by_installed(pin)]
    assert len(known) > 80  # the metadata of most pins is here
    before = "\n".join(line.partition(";")[0] for line in text.splitlines() if '< "3.11"' not in line)
    assert {"numpy on 3.10", "transformers on 3.10"} <= set(excluded(before))


def test_a_pin_s_python_is_asked_in_full_and_within_what_its_file_is_for():
    assert excluded("a==1", lambda pin: ">=3.11.5") == ["a on 3.10", "a on 3.11"]
    assert excluded("# For Python >=3.12: why.\na==1", lambda pin: ">=3.11.5") == []
    assert excluded('a==1; python_version >= "3.12"', lambda pin: ">=3.11.5") == []


# ---- interpreters -------------------------------------------------------------------------------------


@pytest.fixture
def python_folder(tmp_path):
    """Of this interpreter's name, and one that does not run, as pyenv's stand-ins for versions not chosen."""
    name = "python{}.{}".format(*sys.version_info)
    (tmp_path / "works").mkdir()
    (tmp_path / "works" / name).symlink_to(sys.executable)
    (tmp_path / "stands_in").mkdir()
    (tmp_path / "stands_in" / name).write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "stands_in" / name).chmod(0o755)
    return tmp_path


def test_an_interpreter_is_found_once_and_one_that_does_not_run_is_named(python_folder):
    places = [python_folder / name for name in ("stands_in", "none", "works", "works")]
    found, broken = pythons.find("{}.{}".format(*sys.version_info), places)
    assert list(found) == ["{}.{}.{}".format(*sys.version_info)]
    assert broken == [str(next((python_folder / "stands_in").iterdir()))]


def test_a_machine_without_a_python_fails_and_each_is_named(monkeypatch, capsys):
    monkeypatch.setattr(pythons, "folders", list)
    assert pythons.main([]) == 1
    said = capsys.readouterr().out
    assert all(f"Python {python} is not on this machine" in said for python in pythons.supported())


def test_a_python_that_is_not_supported_is_refused(capsys):
    with pytest.raises(SystemExit):
        pythons.main(["3.9"])
    assert "requires-python of pyproject.toml has no Python 3.9" in capsys.readouterr().err
