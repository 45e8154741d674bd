"""``anytron checkpoint list`` and ``verify``. Export needs an engine: tests/backends has it."""

import json

import pytest
from typer.testing import CliRunner

from anytron.base.errors import CheckpointError, ConfigError
from anytron.cli.main import app
from anytron.record.checkpoint.directory import CheckpointDirectory
from anytron.record.checkpoint.manifest import DriverState, FileRecord, SourceState


@pytest.fixture
def run(tmp_path):
    """A run's directory with two complete checkpoints and an interrupted one."""
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    for step in (10, 20):
        training = directory.begin(step)
        (training / "state").write_bytes(bytes(1000 * step))
        sampler = (SourceState(epoch=0, position=step, prompts=99),)
        state = DriverState(step=step, sampler=sampler, weights_version=step, config={})
        directory.commit(state, {"state": FileRecord.of(training / "state")})
    directory.begin(30)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.mark.parametrize("inside", [".", "checkpoints"])
def test_list_shows_what_is_complete_and_what_is_not(run, inside):
    rows = json.loads(invoke("list", run / inside, "--json").stdout)
    assert [(row["step"], row["complete"], row["weights_version"]) for row in rows] == [
        (10, True, 10),
        (20, True, 20),
        (None, False, None),
    ]
    assert rows[0]["bytes"] > 10_000
    shown = invoke("list", run).stdout.splitlines()
    assert shown[0].endswith("step-000010  0.0 MB")
    assert shown[2].endswith("step-000030  interrupted, or being written")


def test_a_directory_without_checkpoints_says_so(tmp_path):
    assert invoke("list", tmp_path).stdout == "no checkpoints\n"
    assert isinstance(invoke("list", tmp_path / "gone").exception, CheckpointError)
    assert isinstance(invoke("verify", tmp_path).exception, CheckpointError)


def test_verify_reads_every_file(run):
    good = invoke("verify", run)
    assert (good.exit_code, good.stdout.count("good")) == (0, 2)
    (run / "checkpoints/step-000010/training/state").write_bytes(bytes(9999))
    bad = invoke("verify", run, "--json")
    assert bad.exit_code == 1
    first, second = json.loads(bad.stdout)
    assert first["problems"] == ["training/state has 9999 bytes and should have 10000"]
    assert second["problems"] == []
    assert invoke("verify", run / "checkpoints/step-000020").exit_code == 0
    assert invoke("verify", run / "checkpoints/step-000010").exit_code == 1


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_checkpoint_names_no_code_that_export_runs(run, tmp_path, by_reference):
    """Its configuration may come from anybody; functions run that the user names."""
    code = f"{tmp_path / 'code.py'}:tokenizer"
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {
        "model": {
            "config": {"model_type": "qwen3", "code": code},
            "tokenizer": "${model.config.code}" if by_reference else code,
        },
        "data": {"source": f"{tmp_path / 'code.py'}:prompts"},
        "rewards": [{"function": f"{tmp_path / 'code.py'}:reward"}],
    }
    directory = CheckpointDirectory(run / "checkpoints")
    directory.begin(40)
    sampler = (SourceState(epoch=0, position=0, prompts=1),)
    directory.commit(DriverState(step=40, sampler=sampler, weights_version=0, config=config), {})
    error = invoke("export", run, tmp_path / "new").exception
    assert isinstance(error, ConfigError)
    assert by_reference or f"model.tokenizer={code}" in error.fix
    assert not by_reference or "there is no directory" in error.why
    assert not (tmp_path / "ran").exists()


def test_export_writes_over_nothing_and_exports_nothing_damaged(run, tmp_path):
    (tmp_path / "there").mkdir()
    assert isinstance(invoke("export", run, tmp_path / "there").exception, ConfigError)
    (run / "checkpoints/step-000020/training/state").write_bytes(b"")
    assert isinstance(invoke("export", run, tmp_path / "new").exception, CheckpointError)
    assert not (tmp_path / "new").exists()
