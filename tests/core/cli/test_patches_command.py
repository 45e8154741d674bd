"""``anytron patches list``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from anytron.device.patches.plan import in_range, installed_version

KEYS = {
    "id", "owner", "target", "phase", "required", "requires", "installed", "verdict", "reason", "purpose", "stays",
    "upstream", "remove_when",
}  # fmt: skip
MEGATRON = installed_version("megatron-core")


def anytron(*arguments, **environment):
    command = [sys.executable, "-c", "from anytron.cli.main import run; run()", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ANYTRON_")}
    return subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def plan():
    done = anytron("patches", "list", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_json_is_the_plan_with_a_reason_for_each_verdict(plan):
    assert all(set(row) == KEYS and row["reason"] and row["purpose"] for row in plan)
    assert {row["verdict"] for row in plan} <= {"applies", "skipped", "superseded"}
    (packing,) = [row for row in plan if row["id"] == "megatron.mla-packed-qkv"]
    assert in_range(MEGATRON, ">=0.13")
    assert (packing["verdict"], packing["reason"]) == ("skipped", f"megatron-core {MEGATRON} is outside of <0.13")


def test_the_bridges_attention_supersedes_the_patch_of_megatrons(plan):
    verdicts = {row["target"]: row["verdict"] for row in plan if row["id"] == "megatron.mla-values"}
    megatrons = "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.forward"
    bridges = "mcore_bridge.model.modules.multi_latent_attention:MLASelfAttention.forward"
    if in_range(MEGATRON, "<0.18,!=0.16.2"):
        assert verdicts == {megatrons: "applies", bridges: "superseded"}
    else:  # which have not the fault: there is nothing to supersede
        assert verdicts == {megatrons: "skipped"}


BROKEN_PATCHES = """
from anytron import hookimpl
from anytron.device.patches import Patch, Phase

@hookimpl
def patch_model(phase):
    if phase is Phase.BEFORE_BUILD:
        return [
            Patch("acme.name", "packaging.version:parze", phase, "to test", replacement="math:floor"),
            Patch("acme.module", "packaging.verzion:parse", phase, "to test",
                  replacement="math:floor", required=False),
            Patch("acme.right", "packaging.version:parse", phase, "to test", replacement="math:floor"),
        ]
"""


@pytest.mark.slow
def test_a_patch_whose_target_does_not_exist_is_told_and_is_a_problem_of_doctor_if_it_is_required(tmp_path):
    (tmp_path / "acme.py").write_text(BROKEN_PATCHES)
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anytron.plugins]\nacme = acme\n")
    listed = json.loads(anytron("patches", "list", "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert {row["id"]: (row["verdict"], row["reason"]) for row in listed if row["owner"] == "acme"} == {
        "acme.name": ("target missing", "packaging.version has no attribute parze"),
        "acme.module": ("target missing", "there is no module packaging.verzion"),
        "acme.right": ("applies", "the patch applies to every version"),
    }
    assert "target missing" in anytron("patches", "list", PYTHONPATH=str(tmp_path)).stdout
    doctor = anytron("doctor", "--json", PYTHONPATH=str(tmp_path))
    assert doctor.returncode == 1
    judged = {
        entry["name"]: entry
        for entry in json.loads(doctor.stdout)["results"]
        if entry["name"].startswith("patches.acme")
    }
    assert {name: entry["status"] for name, entry in judged.items()} == {
        "patches.acme.name": "failed",
        "patches.acme.module": "warning",
        "patches.acme.right": "passed",
    }
    assert "packaging.version:parze (packaging.version has no attribute parze)" in judged["patches.acme.name"]["detail"]


def test_all_adds_the_other_processes_and_says_which(plan):
    everything = json.loads(anytron("patches", "list", "--json", "--all").stdout)
    assert all("role" not in row for row in plan)
    assert {row["id"] for row in plan} <= {row["id"] for row in everything if row["role"] == "trainer"}
    assert {row["role"] for row in everything} <= {"driver", "trainer", "rollout"}


def test_the_table_is_for_people():
    done = anytron("patches", "list", COLUMNS="220")
    assert done.returncode == 0
    assert "megatron.torch-compile" in done.stdout
    assert "platform: cpu" in done.stdout


def test_without_a_platform_it_says_what_to_do():
    done = anytron("patches", "list", ANYTRON_PLATFORM="ascend")
    assert done.returncode == 1
    assert "pip install 'anytron[ascend]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_nobody_offers_is_refused():
    done = anytron("patches", "list", "--engine", "megatrom")
    assert done.returncode == 1
    assert "did you mean megatron" in done.stderr


def test_listing_imports_no_engine(started_cold):
    code = (
        "import sys; from anytron.cli.main import app; app(['patches', 'list', '--json'], standalone_mode=False); "
        "print([n for n in ('megatron', 'mcore_bridge', 'transformers') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip().endswith("[]")
