"""A release, as far as it goes without an index: ``python tests/dist.py [FOLDER]``, or ``tox -e dist``.

The sdist and the wheel of every distribution of this repository are built, each wheel from its sdist, and checked as an
index does. In a fresh environment, outside of this clone, our wheels are installed from their folder alone, then what
they need with constraints/cpu.txt. There the README's first command trains, word for word and to its end, with the
example of the sdist. The exit status is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
PROJECTS = [
    ROOT,
    *(path.parent for places in ("core/*", "plugins/**") for path in sorted(ROOT.glob(f"{places}/pyproject.toml"))),
]
"""The folders of our distributions. Those of examples/ and of ``anytron new-platform`` are other people's."""
LEARNED = 0.9
"""Mean reward of the last steps with which the README's training has learned to sort."""


def name_of(project: Path) -> str:
    """Give the name of a project's distribution."""
    (name,) = re.findall(r'^name = "(.*)"', (project / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return name


def fits(project: Path) -> bool:
    """Whether a project asks for a Python as old as this one; verl excludes the newest."""
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    ((first, end),) = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', text, re.MULTILINE)
    return int(first) <= sys.version_info[1] < int(end)


def readme_command() -> str:
    """Give what the README's first command does after it has installed Anytron."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- train -->.*?```sh\n(.*?)```", readme, re.DOTALL)
    (train,) = re.findall(r"\S*anytron train [^\n&]+", block)
    return train.strip()


def step(what: str, *command: object, cwd: Path, quiet: bool = True) -> None:
    """Run a command as a user who has not set anything for Anytron; print what it does, and its output if it fails.

    Raises:
        SystemExit: It fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANYTRON_", "PYTHON"))}
    print(f"+ {what}", end=" " if quiet else "\n", flush=True)
    began = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, text=True, check=False, **pipes)
    print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))} ends with status {done.returncode}\n{done.stdout or ''}")


def fail(why: str) -> NoReturn:
    """End the program."""
    sys.exit(f"FAILED: {why}")


def build(into: Path) -> None:
    """Build the sdist of each distribution, and the wheel from it, in environments with what it says it builds with."""
    for project in PROJECTS:
        step(f"build {name_of(project)}", sys.executable, "-m", "build", "--outdir", into, project, cwd=into)
    versions = {path.name.removesuffix(".tar.gz").rpartition("-")[2] for path in into.glob("*.tar.gz")}
    if len(versions) != 1:
        fail(f"the distributions of one commit have several versions: {', '.join(sorted(versions))}")
    print(*sorted(f"  {path.name} ({path.stat().st_size / 1e3:.0f} kB)" for path in into.iterdir()), sep="\n")
    step("twine check --strict", sys.executable, "-m", "twine", "check", "--strict", *into.iterdir(), cwd=into)


def install(dist: Path, scratch: Path) -> None:
    """Install our wheels into ``scratch/.venv`` from their folder alone, then all that they need."""
    pip = (scratch / ".venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    names = [name_of(project) for project in PROJECTS if fits(project)]
    ours = (*pip, "install", "--no-index", "--find-links", dist, "--no-deps", *names)
    extras = ("--find-links", dist, "anytron[cuda,ascend]", *names[1:])
    step("a fresh environment", sys.executable, "-m", "venv", scratch / ".venv", cwd=scratch)
    step(f"install {', '.join(names)} from the folder alone", *ours, cwd=scratch)
    # Ours are there already, so that pip takes none from an index; it still resolves what they ask of each other.
    step("install what they need", *pip, "install", "-c", ROOT / "constraints" / "cpu.txt", *extras, cwd=scratch)
    step("pip check", *pip, "check", cwd=scratch)
    where = "import anytron, pathlib, sys; sys.exit(not pathlib.Path(anytron.__file__).is_relative_to(sys.prefix))"
    step("anytron is imported from there", scratch / ".venv" / "bin" / "python", "-c", where, cwd=scratch)


def train(dist: Path, scratch: Path) -> None:
    """Run the README's training in ``scratch``, with the examples of the sdist."""
    (sdist,) = dist.glob("anytron-*.tar.gz")
    shutil.unpack_archive(sdist, scratch)
    (scratch / "examples").symlink_to(next(scratch.glob("anytron-*")) / "examples")
    command = readme_command()
    step(command, "bash", "-euc", command, cwd=scratch, quiet=False)
    (metrics,) = scratch.glob("runs/*/metrics.jsonl")
    rewards = [json.loads(line)["reward/mean"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    reached = sum(rewards[-20:]) / 20
    print(f"  reward {rewards[0]:.2f} in the first of {len(rewards)} steps, {reached:.2f} in the last 20")
    if reached < LEARNED:
        fail(f"the README's training has not learned to sort: its last reward is {reached:.2f}, below {LEARNED}")


def main(arguments: list[str] | None = None) -> None:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where sdists and wheels are kept: a new one, or an empty one"
    )
    given = parser.parse_args(arguments).folder
    if given and given.exists() and any(given.iterdir()):
        parser.error(
            f"{given} is not empty, and all that is in it would be published: remove it, or name another folder"
        )
    with tempfile.TemporaryDirectory(prefix="anytron-dist-") as name:
        dist, scratch = (given or Path(name, "dist")).resolve(), Path(name, "elsewhere")
        dist.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        build(dist)
        install(dist, scratch)
        train(dist, scratch)
    print(f"{len(PROJECTS)} distributions can be published" + (f"; they are in {dist}" if given else ""))


if __name__ == "__main__":
    main()
