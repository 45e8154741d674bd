"""Anytron on each Python that pyproject.toml names: ``python tests/pythons.py [3.10 3.13 ...]``, or ``tox -e pythons``.

For each interpreter that is found, a wheel is installed as users do, with constraints/cpu.txt, and an example trains
two steps; a resumed run trains the second, so that a checkpoint is read. Interpreters are looked for on PATH, and where
pyenv and uv keep theirs. The exit status is 1 if one fails, or if there is none.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
_SHORT = ("rollout.samples_per_prompt=4", "data.prompts_per_step=8")


def supported(text: str | None = None) -> list[str]:
    """Give the Pythons of ``requires-python``, such as ``['3.10', '3.11']``."""
    text = text or (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ((first, end),) = re.findall(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"', text, re.MULTILINE)
    return [f"3.{minor}" for minor in range(int(first), int(end))]


def folders() -> list[Path]:
    """Name the folders in which an interpreter may lie."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    kept = [*pyenv.glob("versions/*/bin"), *Path.home().glob(".local/share/uv/python/*/bin")]
    return [*map(Path, os.get_exec_path()), *sorted(kept)]


def find(python: str, places: Iterable[Path]) -> tuple[dict[str, str], list[str]]:
    """Find the interpreters of a Python, such as ``3.10``: the path of each version, and what does not run."""
    found: dict[str, str] = {}
    broken: list[str] = []
    ask = "import platform, sys; print(platform.python_version(), sys._base_executable)"
    for path in (folder / f"python{python}" for folder in places):
        if not path.is_file():
            continue
        try:
            done = subprocess.run([path, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            broken.append(str(path))
            continue
        version, executable = done.stdout.strip().split(" ", 1)
        found.setdefault(version, executable)
    return found, broken


def call(log: Path, *command: object, cwd: Path) -> None:
    """Run a command, with its output in a file, as in a shell of a user who has not set anything for Anytron."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANYTRON_", "PYTHON"))}
    with log.open("a", encoding="utf-8") as output:
        print("+", *command, file=output, flush=True)
        subprocess.run([*map(str, command)], stdout=output, stderr=output, cwd=cwd, env=environment, check=True)


def check(version: str, executable: str, wheel: Path, scratch: Path) -> bool:
    """Install a wheel for an interpreter and train; say what is done, and the log's end if it fails."""
    directory = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=scratch))
    bin_, run, log = directory / "venv" / "bin", directory / "run", directory / "log"
    train = (bin_ / "anytron", "train", ROOT / "examples" / "grpo_sort.yaml", *_SHORT, f"trainer.output_dir={run}")
    steps = {
        "makes an environment": (executable, "-m", "venv", directory / "venv"),
        "installs": (bin_ / "pip", "install", "-c", ROOT / "constraints" / "cpu.txt", wheel),
        "trains a step": (*train, "trainer.total_steps=1"),
        "resumes, and trains a second one": (*train, "trainer.total_steps=2", "resume=auto"),
    }
    try:
        for what, command in steps.items():
            began = time.monotonic()
            print(f"Python {version} {what}", end=" ", flush=True)
            call(log, *command, cwd=directory)
            print(f"({time.monotonic() - began:.0f} s)", flush=True)
        trained = len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        if trained == 2:
            return True
        print(f"Python {version} has trained {trained} steps instead of two.", flush=True)
    except (OSError, subprocess.CalledProcessError) as error:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:] if log.exists() else []
        print("FAILED", error, *end, sep="\n    ", flush=True)
    finally:
        shutil.rmtree(directory)  # it takes gigabytes
    return False


def main(arguments: list[str] | None = None) -> int:
    """Do it for each Python that is found, and say which are not."""
    pythons = supported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", metavar="PYTHON", nargs="*", help=f"only these of {', '.join(pythons)}")
    wanted = parser.parse_args(arguments).pythons or pythons
    if strangers := [python for python in wanted if python not in pythons]:
        parser.error(
            f"requires-python of pyproject.toml has no Python {', '.join(strangers)}; it has {', '.join(pythons)}"
        )
    found: dict[str, str] = {}
    missing = []
    for python in wanted:
        versions, broken = find(python, folders())
        for version, executable in versions.items():
            print(f"Python {version} is {executable}")
        if not versions:
            missing.append(python)
            print(f"Python {python} is not on this machine", *(f"({path} does not run)" for path in broken))
        found.update(versions)
    if not found:
        print("There is none of them, so nothing is shown. Install one, on PATH or with pyenv or uv.")
        return 1
    with tempfile.TemporaryDirectory(prefix="anytron-pythons-") as scratch:
        print("A wheel is made", flush=True)
        build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, ROOT)
        subprocess.run([*map(str, build)], check=True)
        (wheel,) = Path(scratch).glob("anytron-*.whl")
        passed = [version for version, path in found.items() if check(version, path, wheel, Path(scratch))]
    failed = [version for version in found if version not in passed]
    for what, which in (("Trained two steps", passed), ("Failed", failed), ("Not on this machine", missing)):
        if which:
            print(f"{what}: {', '.join(which)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
