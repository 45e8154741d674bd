"""Collect wheels for a machine without network: those of wheels.txt, and our own.

Nothing of torch or of CUDA: that is the image's. The wheels are divided into folders ``1``, ``2``, ... of at most
55.5 MB, so that they can be carried one after the other; the first holds what images usually lack.

    benchmarks/on_a_gpu/prepare.sh --python 3.12 --platform manylinux_2_28_x86_64 [--into DIR]
    benchmarks/on_a_gpu/prepare.sh --own     # only our own again, after a change of the source
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from wheels import OWN, PIECE_BYTES, ROOT, carried, digest, normalised, pieces

LIST = Path(__file__).with_name("wheels.txt")
PROJECTS = ("", "core/anytron_conformance", "plugins/cuda")
"""Where our own lie in the tree."""
WHEELS = ROOT / "build" / "on_a_gpu" / "wheels"
NOTE = Path("1", "prepared.json")
"""Beside the wheels that are carried first."""


def tags(newest: str) -> list[str]:
    """Platform tags that a machine of this one takes: pip matches each exactly.

    >>> tags("manylinux_2_6_x86_64")
    ['manylinux_2_6_x86_64', 'manylinux_2_5_x86_64', 'manylinux1_x86_64']
    """
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", newest)
    if match is None:
        sys.exit(
            f"Platform {newest!r} is none of manylinux_2_N_ARCHITECTURE (PEP 600), for example that of glibc 2.28."
        )
    minor, machine = int(match[1]), match[2]
    older = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # the older names, PEP 600
    return [
        tag
        for number in range(minor, 4, -1)
        for tag in [f"manylinux_2_{number}_{machine}", *([f"{older[number]}_{machine}"] if number in older else [])]
    ]


def names() -> list[str]:
    """The lines of wheels.txt without comments, in order."""
    lines = (line.partition("#")[0].strip() for line in LIST.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def pip(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)], check=True)


def build_own(folder: Path) -> None:
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, *(ROOT / place for place in PROJECTS))


def download(folder: Path, python: str, newest: str) -> None:
    pip(
        "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}",
        *(f"--platform={tag}" for tag in tags(newest)),
        "--constraint", ROOT / "constraints" / "cpu.txt", "--dest", folder, *names(),
    )  # fmt: skip


def place(collected: Path, into: Path) -> None:
    """Divide the collected wheels into pieces, in the order of wheels.txt, our own first."""
    found = carried(collected)
    order = [*OWN, *(normalised(re.split(r"[=<>~!\[ ]", line)[0]) for line in names())]
    ordered = [found[name].wheel for name in order]
    for number, piece in enumerate(pieces([wheel.stat().st_size for wheel in ordered]), 1):
        (into / str(number)).mkdir(parents=True, exist_ok=True)
        for index in piece:
            shutil.move(ordered[index], into / str(number))


def replace_own(into: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        build_own(Path(folder))
        for name, one in carried(Path(folder)).items():
            before = carried(into)[name].wheel
            before.unlink()
            shutil.move(one.wheel, before.parent)


def note(into: Path, **facts: str) -> None:
    """Write down what was collected, from which state of the tree."""
    git = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"],  # noqa: S607 - the user's own
        capture_output=True,
        text=True,
        check=False,
    )
    path = into / NOTE
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    files = {str(wheel.relative_to(into)): digest(wheel) for wheel in sorted(into.rglob("*.whl"))}
    made = {**before, **facts, "commit": git.stdout.strip(), "sha256": files}
    path.write_text(json.dumps(made, indent=2), encoding="utf-8")


def tell(into: Path) -> None:
    """Print what there is."""
    total = 0
    for piece in sorted({wheel.parent for wheel in into.rglob("*.whl")}):
        sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(piece.glob("*.whl"))}
        assert sum(sizes.values()) <= PIECE_BYTES
        total += sum(sizes.values())
        print(f"{piece}: {len(sizes)} wheels, {sum(sizes.values()) / 1e6:.1f} MB")
    print(f"total: {total / 1e6:.1f} MB. Carry the tree and these folders, then: bash benchmarks/on_a_gpu/run.sh")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser.add_argument("--python", default=here, help="version of the other machine's Python; default: this one's")
    parser.add_argument("--platform", default=f"manylinux_2_28_{platform.machine()}", help="newest tag that it takes")
    parser.add_argument("--into", type=Path, default=WHEELS, help="where the pieces go; wheels there are replaced")
    parser.add_argument("--own", action="store_true", help="build only our own wheels again, in the same place")
    arguments = parser.parse_args()
    into = arguments.into
    if arguments.own:
        replace_own(into)
        note(into)
    else:
        with tempfile.TemporaryDirectory() as collected:
            build_own(Path(collected))
            download(Path(collected), arguments.python, arguments.platform)
            for before in into.glob("[0-9]*/*.whl"):
                before.unlink()
            place(Path(collected), into)
        note(into, python=arguments.python, platform=arguments.platform)
    tell(into)


if __name__ == "__main__":
    main()
