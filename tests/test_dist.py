"""What is in the wheels of a release, from where they have their version, and tests/dist.py itself."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests import dist, pythons
from tests.house import ROOT

if TYPE_CHECKING:
    from email.message import Message
    from pathlib import Path

CUDA = ROOT / "plugins" / "cuda"
NAMES = [dist.name_of(project) for project in dist.PROJECTS]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def hatchling(*arguments: object, cwd: Path, **variables: str) -> str:
    command = [sys.executable, "-m", "hatchling", *map(str, arguments)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@dataclass(frozen=True)
class Wheel:
    """What a wheel says, and the contents of its files."""

    metadata: Message
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Wheel]:
    """The wheels of all our distributions, by name."""
    folder, found = tmp_path_factory.mktemp("wheels"), {}
    for project in dist.PROJECTS:
        hatchling("build", "--target", "wheel", "--directory", folder, cwd=project)
    for path in folder.iterdir():
        with zipfile.ZipFile(path) as opened:
            files = {name: opened.read(name) for name in opened.namelist()}
        (metadata,) = (text for name, text in files.items() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        said = email.message_from_bytes(metadata)
        found[said["Name"]] = Wheel(said, files)
    return found


def test_each_project_is_a_distribution_of_its_own(wheels):
    assert sorted(wheels) == sorted(NAMES)
    assert len(NAMES) == 7


def test_no_file_is_in_two_wheels(wheels):
    owners: dict[str, list[str]] = {}
    for name, wheel in wheels.items():
        for path in wheel.files:
            owners.setdefault(path, []).append(name)
    assert {path: names for path, names in owners.items() if len(names) > 1} == {}
    assert owners["anytron_conformance/run.py"] == ["anytron-conformance"]


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_has_the_licence_and_says_that_each_package_is_typed(wheels, name):
    files = wheels[name].files
    (licence,) = (text for path, text in files.items() if path.endswith(".dist-info/licenses/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_bytes()
    packages = {path.partition("/")[0] for path in files if ".dist-info/" not in path}
    assert packages
    assert {f"{package}/py.typed" for package in packages} <= set(files)


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_says_what_an_index_shows(wheels, name):
    said = wheels[name].metadata
    assert said["Summary"]
    assert said["License-Expression"] == "Apache-2.0"
    classifiers = said.get_all("Classifier")
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    named = [one.rpartition(" ")[2] for one in classifiers if re.search(r":: 3\.\d+$", one)]
    asked = SpecifierSet(said["Requires-Python"])
    assert named == [python for python in pythons.supported() if f"{python}.0" in asked]
    urls = dict(line.split(", ") for line in said.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(home(wheels)) for url in urls.values())
    for file in (urls["Documentation"], urls["Changelog"]):
        assert (ROOT / file.removeprefix(f"{home(wheels)}/blob/main/")).is_file()


@pytest.mark.parametrize("name", NAMES)
def test_every_link_of_a_readme_works_on_an_index(wheels, name):
    """An index shows the README alone: what is relative in the repository leads to the repository."""
    said = wheels[name].metadata
    assert said["Description-Content-Type"] == "text/markdown"
    text = said.get_payload()
    for link in LINK.findall(text):
        assert link.startswith(("https://", "#")), link
        ours = re.fullmatch(rf"{re.escape(home(wheels))}/(?:blob|raw)/main/([^#]+)(?:#.*)?", link)
        assert ours is None or (ROOT / ours[1]).exists(), link
        assert ours is None or ("/raw/" in link) == link.endswith((".png", ".svg")), link
    assert len(LINK.findall(text)) == len(LINK.findall(readme_of(name)))


def home(wheels: dict[str, Wheel]) -> str:
    """Where the project says that it lives."""
    return dict(line.split(", ") for line in wheels["anytron"].metadata.get_all("Project-URL"))["Homepage"]


def readme_of(name: str) -> str:
    (project,) = (project for project in dist.PROJECTS if dist.name_of(project) == name)
    return (project / "README.md").read_text(encoding="utf-8")


def test_what_is_built_meets_what_our_wheels_ask_of_each_other(wheels):
    version = {wheel.metadata["Version"] for wheel in wheels.values()}
    assert len(version) == 1
    asked = [
        (name, need)
        for name, wheel in wheels.items()
        for need in map(Requirement, wheel.metadata.get_all("Requires-Dist", []))
        if need.name in wheels
    ]
    assert {(name, need.name) for name, need in asked} == {
        ("anytron", "anytron-cuda"),
        ("anytron", "anytron-ascend"),
        ("anytron", "anytron-conformance"),
        *((f"anytron-{plugin}", "anytron") for plugin in ("conformance", "cuda", "ascend", "verl", "swift")),
    }
    for _, need in asked:
        assert need.specifier.contains(*version), need  # as pip asks: a range without .dev takes no version of a commit
        assert need.specifier.contains("0.1.0"), need
        assert not need.specifier.contains("0.2.0"), need


# ---- the version --------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path):
    """A repository with one of our distributions and no tag."""
    project = shutil.copytree(CUDA, tmp_path / "clone" / "plugins" / "cuda")
    git(tmp_path / "clone", "init", "--quiet")
    commit(tmp_path / "clone")
    return project


def git(folder: Path, *arguments: object) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    command = ["git", "-C", folder, *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "a change")
    return git(folder, "rev-parse", "HEAD")[:9]


def version_in(project: Path, **variables: str) -> str:
    return hatchling("metadata", "version", cwd=project, **variables).splitlines()[-1]


def test_two_commits_have_two_versions_and_a_tag_is_the_release(clone):
    repository = clone.parents[1]
    assert version_in(clone) == f"0.1.dev1+g{git(repository, 'rev-parse', 'HEAD')[:9]}"
    second = commit(repository)
    assert version_in(clone) == f"0.1.dev2+g{second}"
    git(repository, "tag", "v0.1.0")
    assert version_in(clone) == "0.1.0"
    (clone / "README.md").write_text("changed")
    assert re.fullmatch(rf"0\.1\.1\.dev0\+g{second}\.d\d+", version_in(clone))


def test_a_shallow_clone_of_somebody_else_has_its_commit(clone, tmp_path):
    """As CI has it: one commit without tags, in a folder of another user, which git calls dubious."""
    second = commit(clone.parents[1])
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{clone.parents[1]}", "shallow")
    stranger = {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    there = tmp_path / "shallow" / "plugins" / "cuda"
    asked = subprocess.run(
        ["git", "status"], cwd=there, env={**os.environ, **stranger}, capture_output=True, text=True, check=False
    )
    assert "dubious ownership" in asked.stderr
    assert version_in(there, **stranger) == f"0.1.dev1+g{second}"


def test_an_sdist_keeps_the_version_and_a_tree_without_git_names_no_commit(clone, tmp_path):
    version = version_in(clone)
    hatchling("build", "--target", "sdist", "--directory", tmp_path, cwd=clone)
    (sdist,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", sdist], cwd=tmp_path, check=True)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert version_in(unpacked) == version
    shutil.rmtree(clone.parents[1] / ".git")
    assert version_in(clone) == "0.1.dev0"


def test_the_version_is_found_without_importing_anything_heavy():
    program = "import sys, anytron; print(anytron.__version__, 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"\d+\.\d+\S* False\n", said)


# ---- the program --------------------------------------------------------------------------------------


def test_it_trains_what_the_readme_trains():
    assert re.fullmatch(r"\S*anytron train examples/grpo_sort\.yaml", dist.readme_command())


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "old.whl").touch()
    with pytest.raises(SystemExit):
        dist.main([str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "old.whl").exists()


def test_a_step_that_fails_ends_it_with_what_was_said(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"(?s)FAILED: bash -c .*status 3\nit said so"):
        dist.step("try", "bash", "-c", "echo it said so; exit 3", cwd=tmp_path)
