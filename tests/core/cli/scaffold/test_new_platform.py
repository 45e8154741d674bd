"""``anytron new-platform``: what it writes is a platform that says what it is, and what it refuses to write."""

from __future__ import annotations

import compileall
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import anytron
from anytron.base.errors import PluginError
from anytron.cli.new_platform import TEMPLATE, Names, names_of, template_files, write_package
from anytron.device.hooks.registry import specifications
from tests.third_party_platform import SAMPLE

LOADED = """
import json
from anytron.device.loading import open_session
from anytron.device.platform import decisions_of

session = open_session("left-acme2")
(decision,) = decisions_of(session.platform)
print(json.dumps([type(session.platform).__name__, session.platform.runtime().device_name(), str(decision)]))
"""


def command(*arguments, cwd):
    program = [sys.executable, "-m", "anytron", "new-platform", *arguments]
    return subprocess.run(program, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def written(directory):
    return {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}


def test_the_package_is_the_template_under_another_name(tmp_path):
    same = written(write_package(Names("acme"), tmp_path))
    assert {name: path.read_text() for name, path in same.items()} == {
        path.relative_to(TEMPLATE).as_posix(): path.read_text() for path in template_files()
    }
    other = written(write_package(Names("basaltic-rock"), tmp_path))
    assert set(other) == {name.replace("acme", "basaltic_rock") for name in same}
    for name, path in other.items():
        assert re.search("acme", path.read_text(), re.IGNORECASE) is None, name
    assert compileall.compile_dir(tmp_path, quiet=1)


@pytest.mark.slow
def test_a_name_that_contains_that_of_the_template_is_put_in_once(tmp_path):
    """It is loaded as an installed distribution is, and says on what it computes."""
    directory = write_package(names_of("left-acme2"), tmp_path)
    info = tmp_path / "anytron_left_acme2-0.1.0.dist-info"
    info.mkdir()
    project = (directory / "pyproject.toml").read_text()
    point = re.search(r'^\[project.entry-points."anytron.platforms"\]\n(.+)$', project, re.MULTILINE)[1]
    assert point == 'left-acme2 = "anytron_left_acme2:LeftAcme2Platform"'
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anytron-left-acme2\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[anytron.platforms]\n" + point.replace('"', "") + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(directory), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    kind, device, decision = json.loads(done.stdout)
    assert kind == "LeftAcme2Platform"
    assert device == "the host's processor (anytron-left-acme2 names no device yet)"
    assert decision.startswith("device: the host's processor (")


def test_it_lists_every_hook_as_what_to_write_next():
    text = (TEMPLATE / "anytron_acme" / "platform.py").read_text()
    listed = re.findall(r"^    #   (\w+)  +\S", text, re.MULTILINE)
    assert sorted(listed) == sorted(specifications())


def test_it_needs_the_anytron_that_wrote_it():
    text = (TEMPLATE / "pyproject.toml").read_text()
    assert Requirement(re.search(r'^dependencies = \["(.+)"\]$', text, re.MULTILINE)[1]).specifier.contains(
        anytron.__version__
    )


@pytest.mark.parametrize(
    ("name", "why", "fix"),
    [
        ("Acme_2", "lower-case", "anytron new-platform acme-2"),
        ("3d", "begin with a letter", "for example: anytron new-platform acme"),
        ("a/../b", "lower-case", "for example: anytron new-platform acme"),
        ("", "lower-case", "for example: anytron new-platform acme"),
        ("cpu", "the installed distribution anytron offers it", "another name"),
        ("megatron", "the installed distribution anytron offers it", "another name"),
        ("ascend", "a platform of this project", "another name"),
        ("ray", "an import package anytron_ray is installed", "another name"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name, why, fix):
    with pytest.raises(PluginError) as caught:
        names_of(name)
    assert why in caught.value.why
    assert fix in caught.value.fix


def test_nothing_is_overwritten(tmp_path):
    directory = write_package(Names("acme"), tmp_path)
    (directory / "README.md").write_text("mine")
    with pytest.raises(PluginError, match="already exists") as caught:
        write_package(Names("acme"), tmp_path)
    assert "--into" in caught.value.fix
    assert (directory / "README.md").read_text() == "mine"


@pytest.mark.parametrize("place", ["file", "/proc"])
def test_a_place_that_is_no_directory_is_an_error(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(PluginError, match="cannot be written"):
        write_package(Names("acme"), tmp_path / place)


def test_who_has_installed_it_is_told_how_to_begin_again(tmp_path, monkeypatch):
    info = tmp_path / "anytron_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anytron-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[anytron.platforms]\nacme = anytron_acme:AcmePlatform\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match="already exists") as caught:
        names_of("acme")
    assert caught.value.fix.startswith("pip uninstall anytron-acme, or choose another name")


@pytest.mark.some(1)
@pytest.mark.parametrize("project", [TEMPLATE, SAMPLE], ids=["template", "sample"])
def test_its_tests_run_within_a_folder_that_has_other_settings(tmp_path, project):
    """Such as a clone of this repository, whose own need plugins of pytest."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--strict-config"]\nno_such_option = 1\n'
    )
    tests = tmp_path / "package" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_conformance.py").write_text("def test_conformance():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]

    def run():
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert "no_such_option" in run().stderr, "or this shows nothing"
    (tmp_path / "package" / "pyproject.toml").write_text((project / "pyproject.toml").read_text())
    assert run().returncode == 0


@pytest.mark.parametrize(("into", "place"), [((), "./anytron-acme"), (("--into", "a b"), "'./a b/anytron-acme'")])
def test_the_command_says_what_to_do_next(tmp_path, into, place):
    done = command("acme", *into, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    commands = [line.partition("#")[0].strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert commands == [f"pip install --editable {place}", "anytron conformance acme --level device"]
    assert (tmp_path / Path(*into[1:]) / "anytron-acme" / "pyproject.toml").is_file()
    again = command("acme", *into, cwd=tmp_path)
    assert again.returncode == 1
    assert "fix: delete the directory, or choose another parent directory" in again.stderr
    assert "Traceback" not in again.stderr
