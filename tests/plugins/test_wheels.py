"""The distributions as people install them: wheels, extras, entry points, a fresh environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, ROOT / "plugins" / "cuda", ROOT / "plugins" / "ascend", Path(__file__).parent / "toy_platform")


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A fresh environment with ``anytron[ascend]`` and the toy from wheels; third-party packages are borrowed."""
    base = tmp_path_factory.mktemp("wheels")
    wheels, environment, borrowed = base / "dist", base / "venv", base / "borrowed"
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, *SOURCES)
    assert {wheel.name.split("-")[0] for wheel in wheels.glob("*.whl")} == {
        "anytron",
        "anytron_cuda",
        "anytron_ascend",
        "anytron_toy",
    }
    venv.create(environment, with_pip=False)
    # Links to the packages of this environment, all but our own, so that nothing has to be downloaded.
    borrowed.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.lstrip("_").startswith("anytron") and package.suffix != ".pth":
            (borrowed / package.name).symlink_to(package)
    site_packages = next(environment.glob("lib/python*/site-packages"))
    (site_packages / "borrowed.pth").write_text(f"{borrowed}\n")
    pip(
        "--python", environment / "bin" / "python", "install", "--no-index", "--find-links", wheels,
        "anytron[ascend]", "anytron-toy",
    )  # fmt: skip
    return environment


def run(environment: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ANYTRON_", "PYTHON"))}
    program = environment / "bin" / command[0]
    return subprocess.run(
        [program, *command[1:]],
        env={**clean, **variables},
        cwd=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_extra_brings_the_platform_and_the_command_lists_it(installed):
    done = run(installed, "anytron", "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    found = {report["name"]: report for report in json.loads(done.stdout)}
    assert set(found) == {"cpu", "ascend", "toy", "megatron"}
    assert (found["ascend"]["distribution"], found["ascend"]["state"]) == ("anytron-ascend", "unavailable")
    assert found["cpu"]["state"] == "active"
    assert "every installed accelerator is absent" in found["cpu"]["reason"]
    assert len(found["toy"]["hooks"]) == 12


def test_an_installed_platform_whose_device_is_there_becomes_active(installed):
    done = run(installed, "anytron", "plugins", "list", "--json", TOY_DEVICE="usable")
    states = {report["name"]: report["state"] for report in json.loads(done.stdout)}
    assert (states["toy"], states["cpu"]) == ("active", "available")


def test_no_import_name_but_ours_is_installed(installed):
    site_packages = next(installed.glob("lib/python*/site-packages"))
    names = {path.name for path in site_packages.iterdir() if path.suffix not in (".dist-info", ".pth")}
    parts = ("", "_megatron", "_ray", "_rollout", "_verifiers", "_vllm", "_cpu", "_ascend", "_toy")
    assert names == {f"anytron{part}" for part in parts}


def test_the_package_is_typed_and_imported_from_the_wheel(installed):
    done = run(installed, "python", "-c", "import anytron, pathlib; print(pathlib.Path(anytron.__file__).parent)")
    package = Path(done.stdout.strip())
    assert installed in package.parents
    assert (package / "py.typed").exists()


def test_an_ascend_run_without_an_npu_is_refused_with_what_why_and_fix(installed):
    done = run(installed, "anytron", "plugins", "list", ANYTRON_PLATFORM="ascend")
    assert "Platform 'ascend' cannot be used: its device is not on this machine." in done.stderr
    assert "torch_npu is not installed" in done.stderr
    assert "pip install torch-npu" in done.stderr
