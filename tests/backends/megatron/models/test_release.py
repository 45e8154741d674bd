"""What the engine knows of Megatron's versions is what the package asks for, and what the installed one has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from anytron_megatron.models.release import SUPPORTED
from tests.backends.megatron.programs import release

ROOT = Path(__file__).parents[4]


def test_the_package_asks_for_the_versions_that_the_engine_takes():
    (asked,) = re.findall(r'"megatron-core(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert SpecifierSet(asked) == SpecifierSet(SUPPORTED)


@pytest.fixture(scope="module")
def facts():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", release.__name__], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines() if line.startswith("fact-"))


def test_what_routers_note_is_found_and_forgotten(facts):
    assert facts["fact-noted"] == "0.5,0.0"
    assert facts["fact-forgotten"] == "0.0,0.0"


def test_what_the_constructor_of_gated_delta_net_asks_is_found(facts):
    assert facts["fact-without"] == "ImportError"
    assert facts["fact-with"] != "ImportError"
