"""What ``anytron-swift`` says of mistakes: one error with four parts, before ms-swift starts, and no traceback."""

import os
import subprocess
import sys

import pytest

from anytron.device.loading import report
from anytron_swift import cli, installation

PLATFORMS = ("ANYTRON_PLATFORM", "ANYTRON_PLATFORM_OPTIONS")


def refused(capsys, monkeypatch, *words):
    """Run the command line here; return its exit status and what it says."""
    monkeypatch.setattr(sys, "argv", ["anytron-swift", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


@pytest.fixture
def supported(monkeypatch):
    """Let the configuration file be read without ms-swift, whose import takes seconds."""
    read = []
    monkeypatch.setattr(installation, "require_supported", lambda: None)
    monkeypatch.setattr(installation, "load", lambda module, name: read.append)
    return read


def test_help_is_given_where_it_is_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["anytron-swift", "--help"])
    cli.main()
    assert "Usage: anytron-swift {pt,sft,rlhf,export}" in capsys.readouterr().out
    status, said = refused(capsys, monkeypatch)
    assert status == 2
    assert "Usage: anytron-swift {pt,sft,rlhf,export}" in said


@pytest.mark.parametrize(("command", "fix"), [("SFT", "did you mean sft?"), ("train", "pt, sft, rlhf, export")])
def test_a_command_that_is_none_is_named(capsys, monkeypatch, command, fix):
    status, said = refused(capsys, monkeypatch, command, "--model", "m")
    assert status == 2
    assert f"error: '{command}' is not a command of anytron-swift." in said
    assert fix in said


@pytest.mark.parametrize("version", [None, "4.5.3", "4.7.0"])
def test_another_ms_swift_is_refused_by_its_metadata(capsys, monkeypatch, version):
    found = [] if version is None else [type("", (), {"version": version, "locate_file": lambda self, path: "lib"})()]
    monkeypatch.setattr(report, "distributions", lambda name: found)
    status, said = refused(capsys, monkeypatch, "sft")
    assert status == 1
    assert "it is not installed" in said if version is None else f"{version} is installed" in said
    assert "fix: pip install --no-deps ms-swift==4.6.0" in said


def test_a_package_that_ms_swift_misses_is_named(capsys, monkeypatch):
    monkeypatch.setattr(installation, "require_supported", lambda: None)
    monkeypatch.setitem(sys.modules, "swift", None)
    status, said = refused(capsys, monkeypatch, "sft")
    assert status == 1
    assert "A package that ms-swift imports is not installed." in said
    assert "constraints/swift.txt" in said


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [
        ("ANYTRON_PLATFORM", "tpu", "Platform 'tpu' is not installed."),
        ("ANYTRON_PLATFORM_OPTIONS", "{", "ANYTRON_PLATFORM_OPTIONS is not a JSON object."),
    ],
)
def test_the_platform_is_refused_once_and_not_by_each_rank(capsys, monkeypatch, supported, variable, value, what):
    for name in PLATFORMS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv(variable, value)
    status, said = refused(capsys, monkeypatch, "sft", "--model", "m")
    assert status == 1
    assert said.startswith(f"error: {what}")
    assert said.count("error:") == 1
    assert supported == [["--model", "m"]]


def test_the_platform_may_stand_in_the_configuration_file(capsys, monkeypatch, tmp_path):
    config = tmp_path / "sft.yaml"
    config.write_text("ENV: {ANYTRON_PLATFORM: tpu}\n", encoding="utf-8")
    monkeypatch.setenv("ANYTRON_PLATFORM", "")  # put back afterwards
    monkeypatch.delenv("ANYTRON_PLATFORM")
    monkeypatch.setenv("SWIFT_CONFIG_FILE", "")
    status, said = refused(capsys, monkeypatch, "sft", str(config))
    assert status == 1
    assert "where: ANYTRON_PLATFORM=tpu" in said


def test_a_megatron_that_came_first_is_an_error_without_a_traceback():
    program = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core');"
        "from anytron_swift.process import start; start('megatron_sft_main')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ANYTRON_PLATFORM": "cpu"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "why: megatron.core is imported already" in done.stderr
    assert "Traceback" not in done.stderr
