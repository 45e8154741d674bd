"""The distributions as people install them: wheels, extras, entry points, a fresh environment.

Beside ours lies a stranger's: the complete platform of examples/third_party_platform, and one that is written here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.docs.test_pages import blocks
from tests.house import ROOT
from tests.third_party_platform import SAMPLE, USABLE

SOURCES = (
    ROOT,
    ROOT / "core" / "anytron_conformance",
    *(ROOT / "plugins" / name for name in ("cuda", "ascend", "verl")),
    SAMPLE,
    SAMPLE / "sdk",
)
SHORT = ("rollout.samples_per_prompt=4", "data.prompts_per_step=8")


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A fresh environment with ``anytron[ascend]`` and the sample from wheels; third-party packages are borrowed."""
    base = tmp_path_factory.mktemp("wheels")
    wheels, environment, borrowed = base / "dist", base / "venv", base / "borrowed"
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, *SOURCES)
    assert {wheel.name.split("-")[0] for wheel in wheels.glob("*.whl")} == {
        "anytron",
        "anytron_conformance",
        "anytron_cuda",
        "anytron_ascend",
        "anytron_verl",
        "anytron_basalt",
        "basalt_sdk",
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
        "anytron[ascend,conformance]", "anytron-basalt",
    )  # fmt: skip
    return environment


def run(environment: Path, *command: str, cwd: Path | None = None, **variables: str):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ANYTRON_", "PYTHON"))}
    clean["PATH"] = f"{environment / 'bin'}{os.pathsep}{clean['PATH']}"
    return subprocess.run(
        command,
        env={**clean, **variables},
        cwd=cwd or environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )


@pytest.mark.slow
def test_the_extra_brings_the_platform_and_the_command_lists_it(installed):
    done = run(installed, "anytron", "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    found = {report["name"]: report for report in json.loads(done.stdout)}
    assert set(found) == {"accelerator", "cpu", "ascend", "basalt", "megatron"}
    assert (found["ascend"]["distribution"], found["ascend"]["state"]) == ("anytron-ascend", "unavailable")
    assert found["cpu"]["state"] == "active"
    assert "every installed accelerator is absent" in found["cpu"]["reason"]
    assert len(found["basalt"]["hooks"]) == 10


def test_an_installed_platform_whose_device_is_there_becomes_active(installed):
    done = run(installed, "anytron", "plugins", "list", "--json", **USABLE)
    states = {report["name"]: report["state"] for report in json.loads(done.stdout)}
    assert (states["basalt"], states["cpu"]) == ("active", "available")


def test_no_import_name_but_ours_is_installed(installed):
    site_packages = next(installed.glob("lib/python*/site-packages"))
    names = {path.name for path in site_packages.iterdir() if path.suffix not in (".dist-info", ".pth")}
    parts = ("accelerator", "ascend", "basalt", "conformance", "cpu", "megatron", "ray", "rollout", "verifiers", "vllm")
    assert names == {"anytron", *(f"anytron_{part}" for part in parts), "basalt_sdk"}


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


# ---- a stranger's platform ----------------------------------------------------------------------------


def train(environment: Path, directory: Path, steps: int, **variables: str) -> list[dict]:
    """Train the example for some steps; give their metrics."""
    output = f"trainer.output_dir={directory / 'run'}"
    example = str(ROOT / "examples" / "grpo_sort.yaml")
    done = run(environment, "anytron", "train", example, f"trainer.total_steps={steps}", output, *SHORT, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def assert_trained(metrics: list[dict], steps: int) -> None:
    assert len(metrics) == steps
    assert all(step["grad_norm"] > 0 and step["rollout/log_prob_abs_diff"] < 1e-4 for step in metrics)


@pytest.mark.slow
def test_the_sample_s_own_tests_pass_beside_ours(installed):
    """The three lines that are the kit, here its level ``device``, and what only the sample's authors know."""
    tests = str(SAMPLE / "tests")
    command = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "device or basalt", "--rootdir", tests)
    done = run(installed, *command, "-rp", tests, **USABLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conformance[device.patches-take-effect]" in done.stdout
    assert "test_the_kernel_refuses_sequences_that_start_within_a_tile" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "levels",
    [
        ("device", "sequences"),
        pytest.param(("kernels", "training"), marks=pytest.mark.slow),
        pytest.param(("model",), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_the_sample_passes_the_kit(installed, levels):
    """All of it, most of it slow: ``training`` compares updates on one rank, TP2 and DP2. The next test trains."""
    done = run(
        installed, "anytron", "conformance", "basalt", "--json", *(f"--level={level}" for level in levels), **USABLE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [rule["name"] for rule in json.loads(done.stdout)["results"]]
    assert list(dict.fromkeys(name.partition(".")[0] for name in names)) == [*levels]


def test_the_sample_trains_five_steps(installed, tmp_path):
    assert_trained(train(installed, tmp_path, 5, **USABLE), 5)
    (rank,) = json.loads((tmp_path / "run" / "patches.json").read_text())["trainer"]
    assert "basalt.tile" in {patch["id"] for patch in rank["patches"] if patch["outcome"] == "applied"}


@pytest.fixture
def pip_here(installed):
    """``pip install`` is a command of the fresh environment; it asks no index."""
    program = installed / "bin" / "pip"
    offline = "--no-index --no-build-isolation --no-deps"
    program.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -m pip --python {installed}/bin/python install {offline} "$@"\n'
    )
    program.chmod(0o755)
    yield
    pip("--python", installed / "bin" / "python", "uninstall", "--yes", "anytron-acme")


@pytest.mark.slow
@pytest.mark.usefixtures("pip_here")
def test_a_new_platform_passes_level_device_at_once(installed, tmp_path):
    """Word for word what ``anytron new-platform --help`` says, and then what that says."""
    said = run(installed, "anytron", "new-platform", "--help").stdout
    example = " ".join(said.partition("Example: ")[2].partition("\n\n")[0].split())
    done = run(installed, "bash", "-euc", example, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 failed, " in done.stdout
    assert "platform: acme (anytron-acme computes on the host's processor" in done.stderr


INTO = {
    "anytron_acme/runtime.py": "    # Delete these two methods",
    "anytron_acme/platform.py": "    # What to write next.",
}
"""Before which line of a file the tutorial's methods are put."""


@pytest.mark.slow
@pytest.mark.usefixtures("pip_here")
def test_the_tutorial_word_for_word(installed, tmp_path):
    """Its files are written, its methods put in, and its commands run, in the order of the page."""
    page = "docs/tutorial/bring-up-a-chip.md"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    package = tmp_path / "anytron-acme"
    first, second, broken, checked, trained = blocks(page, "sh")
    fault, kernels, hook = (text.partition("\n")[::2] for text in blocks(page, "python"))

    def commands(block: str) -> subprocess.CompletedProcess[str]:
        done = run(installed, "bash", "-euc", block, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def put_in(heading: str, method: str) -> tuple[Path, str]:
        name = heading.removeprefix("# ")
        before = (package / name).read_text()
        assert before.count(INTO[name]) == 1
        text = before.replace("from anytron import ", "from anytron import hookimpl, ")
        (package / name).write_text(text.replace(INTO[name], f"{method}\n{INTO[name]}"))
        return package / name, before

    assert "platform: acme (anytron-acme computes" in commands(first).stderr
    assert "device" in commands(second).stdout
    file, before = put_in(*fault)
    said = commands(broken).stdout
    assert "rng-round-trip" in said
    assert said.endswith("a rule is broken\n")
    file.write_text(before)
    (package / kernels[0].removeprefix("# ")).write_text(kernels[1])
    put_in(*hook)
    commands(checked)
    commands(trained)
    (rank,) = json.loads((tmp_path / "runs/acme/patches.json").read_text())["trainer"]
    assert rank["kernels"]["fused_kernel swiglu"] == "acme"
