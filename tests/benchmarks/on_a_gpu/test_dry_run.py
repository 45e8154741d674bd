"""The whole of it on the processor: wheels from the registry, images of several kinds, every step in a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution, distributions
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from tests.house import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SCRIPTS = ROOT / "benchmarks" / "on_a_gpu"
ANOTHER_TORCH = "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')\n"


def script(name, *arguments, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ANYTRON_", "PYTHON"))}
    command = ["bash", SCRIPTS / name, *map(str, arguments)]
    return subprocess.run(command, env={**clean, **variables}, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    done = script("prepare.sh", "--into", folder, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    for piece in ("1", "2", "3"):
        assert sum(wheel.stat().st_size for wheel in (folder / piece).iterdir()) <= 60_000_000
    return folder


def closure(names):
    """These distributions and all that they require, as far as they are installed here."""
    found, queue = {}, list(names)
    while queue:
        name = queue.pop()
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue
        if one.metadata["Name"] not in found:
            found[one.metadata["Name"]] = one
            needed = map(Requirement, one.requires or ())
            queue += [line.name for line in needed if line.marker is None or line.marker.evaluate({"extra": ""})]
    return list(found.values())


def make_image(folder: Path, packages, fakes) -> Path:
    """A Python, itself a virtual environment, with these distributions of the one that runs, and fake ones."""
    venv.create(folder, with_pip=False)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for one in packages:
        for top in {file.parts[0] for file in one.files or () if file.parts[0] != ".."}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(one.locate_file(top))
    for name, (version, module, source) in fakes.items():
        information = site_packages / f"{module}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (site_packages / module).mkdir()
        (site_packages / module / "__init__.py").write_text(source)
    return folder / "bin" / "python"


def everything_else():
    return [one for one in distributions() if not one.metadata["Name"].startswith("anytron") and one.files]


IMAGES = {
    "torch-alone": (lambda: closure(["torch"]), {}, []),
    "everything": (everything_else, {}, ["--only", "tests,verify"]),
    "of-another-time": (
        lambda: closure(["torch"]),
        {
            "transformers": ("4.40.0", "transformers", "raise ImportError('of another time')\n"),
            "transformer-engine": ("2.9.0", "transformer_engine", ANOTHER_TORCH),
            "flash-attn": ("2.8.3", "flash_attn", ANOTHER_TORCH),
        },
        ["--only", "tests,grpo_sort"],
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_the_dry_run_passes(name, wheels, tmp_path):
    packages, fakes, arguments = IMAGES[name]
    image = make_image(tmp_path / "image", packages(), fakes)
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    (tmp_path / "constraints.txt").write_text("transformers==4.40.0\n")
    done = script(
        "run.sh", "--dry-run", "--wheels", wheels, "--work", tmp_path / "work", "--out", tmp_path / "out", *arguments,
        PYTHON=str(image), HOME=str(home), PIP_CONSTRAINT=str(tmp_path / "constraints.txt"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["lacking"] == []
    assert list(found["left_out"]) == ["liger-kernel"]  # it needs Triton, which a torch for CUDA brings
    assert "torch" in found["of_the_image"]
    assert ("transformers" in found["from_wheels"]) == (name != "everything")
    assert {step["status"] for step in found["steps"].values()} <= {"passed", "absent"}
    for module in ("transformer_engine", "flash_attn"):
        broken = f"{fakes[module.replace('_', '-')][0]}, which cannot be imported" if fakes else ""
        assert (found["machine"]["versions"][module] or "").startswith(broken)
    if not arguments:
        assert found["headlines"]["grpo_sort.steps"] == 3
        for headline in ("train_step.ours_by_bare", "attention.ours_by_direct", "grpo_step.toy_step_s"):
            assert found["headlines"][headline] > 0
