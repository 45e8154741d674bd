"""``anytron patches list``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from anytron.patches.versions import in_range, installed_version

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


def rows(*arguments):
    done = anytron("patches", "list", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_json_is_the_plan_with_a_reason_for_each_verdict():
    plan = rows()
    assert all(set(row) == KEYS and row["reason"] and row["purpose"] for row in plan)
    assert {row["verdict"] for row in plan} <= {"applies", "skipped", "superseded"}
    (packing,) = [row for row in plan if row["id"] == "megatron.mla-packed-qkv"]
    assert in_range(MEGATRON, ">=0.13")
    assert (packing["verdict"], packing["reason"]) == ("skipped", f"megatron-core {MEGATRON} is outside of <0.13")


def test_the_bridges_attention_supersedes_the_patch_of_megatrons():
    verdicts = {row["target"]: row["verdict"] for row in rows() if row["id"] == "megatron.mla-values"}
    assert verdicts == {
        "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.forward": "applies",
        "mcore_bridge.model.modules.multi_latent_attention:MLASelfAttention.forward": "superseded",
    }


def test_all_adds_the_other_processes_and_says_which():
    plain, everything = rows(), rows("--all")
    assert all("role" not in row for row in plain)
    assert {row["id"] for row in plain} <= {row["id"] for row in everything if row["role"] == "trainer"}
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


def test_listing_imports_no_engine():
    code = (
        "import sys; from anytron.cli.main import app; app(['patches', 'list', '--json'], standalone_mode=False); "
        "print([n for n in ('megatron', 'mcore_bridge', 'transformers') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip().endswith("[]")
