"""``anytron plugins list``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

NEEDING = """
from anytron import hookimpl
from anytron.device.hooks.types import Requirement

@hookimpl
def requirements():
    return [Requirement("a-package-that-nobody-has")]
"""
KEYS = {"name", "kind", "distribution", "version", "state", "reason", "hooks"}


def anytron(*arguments, **environment):
    command = [sys.executable, "-c", "from anytron.cli.main import run; run()", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ANYTRON_")}
    return subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def test_json_is_a_list_of_reports_with_the_processor_active():
    done = anytron("plugins", "list", "--json")
    assert done.returncode == 0
    reports = json.loads(done.stdout)
    assert all(set(report) - {"remedy", "requirements"} == KEYS for report in reports)
    cpu = next(report for report in reports if report["name"] == "cpu")
    assert (cpu["kind"], cpu["state"]) == ("platform", "active")


def test_what_an_active_plugin_needs_is_shown_with_version_and_place():
    reports = json.loads(anytron("plugins", "list", "--json").stdout)
    megatron = next(report for report in reports if report["name"] == "megatron")
    (core,) = [one for one in megatron["requirements"] if one["package"] == "megatron-core"]
    assert core["fits"]
    assert core["installed"] == version("megatron-core")
    assert len(core["locations"]) == 1
    assert (
        f"megatron-core{core['specifier']}: {core['installed']} in {core['locations'][0]}"
        in anytron("plugins", "list").stdout
    )


def test_the_table_shows_state_reason_and_remedy_whole():
    done = anytron("plugins", "list", ANYTRON_DISABLE_PLUGINS="megatron", COLUMNS="200")
    assert done.returncode == 0
    assert "blocked" in done.stdout
    assert "change or unset ANYTRON_DISABLE_PLUGINS" in done.stdout


def test_without_an_active_platform_the_list_is_shown_and_the_reason_goes_to_stderr():
    done = anytron("plugins", "list", "--json", ANYTRON_PLATFORM="ascend")
    assert done.returncode == 0
    assert "active" not in {one["state"] for one in json.loads(done.stdout) if one["kind"] == "platform"}
    assert "No platform is active. Platform 'ascend' is not installed." in done.stderr
    assert "pip install 'anytron[ascend]'" in done.stderr


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("source", "state", "status"),
    [
        ("def runtime_env(process): return {}", "broken", 1),
        ("api_version = 99", "incompatible", 1),
        ("import a_package_that_nobody_has", "broken", 1),
        (NEEDING, "incompatible", 0),
        ("", "active", 0),
    ],
)
def test_the_exit_status_says_whether_a_plugin_is_at_fault(tmp_path, source, state, status):
    (tmp_path / "acme.py").write_text(source)
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anytron.plugins]\nacme = acme\n")
    done = anytron("plugins", "list", "--json", PYTHONPATH=str(tmp_path))
    (acme,) = [report for report in json.loads(done.stdout) if report["name"] == "acme"]
    assert (acme["state"], done.returncode) == (state, status), done.stderr
    assert bool(acme.get("remedy")) == (state != "active"), "a reason comes with its remedy"


def test_a_wrong_allow_list_is_an_error_without_a_traceback():
    done = anytron("plugins", "list", ANYTRON_PLUGINS="nothing-of-this-name")
    assert done.returncode != 0
    assert "nothing-of-this-name" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("plugins", "--help"), ("plugins", "list", "--help")])
def test_help_is_there(arguments):
    assert "plugins" in anytron(*arguments).stdout
