"""Who may write into an output directory, and what is deleted there."""

import subprocess
import sys

import pytest

from anytron.config.schema import RunConfig
from anytron.errors import ConfigError
from anytron.tracking.claim import ClaimedDirectory, overwritten
from anytron.tracking.run_directory import RunDirectory


def config(tmp_path, **sections):
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
            "data": {"source": "jsonl"},
            "rewards": [{"function": "exact_match"}],
            "trainer": {"output_dir": str(tmp_path / "run")},
        }
        | sections
    )


def run(tmp_path):
    """A run that has come as far as its first metrics."""
    given = config(tmp_path)
    with ClaimedDirectory(given, print) as claimed, RunDirectory.begin(claimed, given) as directory:
        directory.write_metrics({"step": 1})
    return directory.path


HOLDER = """
import sys
from pathlib import Path
from anytron.files import Lock
lock = Lock(Path(sys.argv[1]) / ".lock")
print("locked", flush=True)
sys.stdin.read()
"""


def test_two_runs_do_not_write_into_one_directory(tmp_path):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=rf"(?s)Another run is writing.*process {other.pid} on .* has locked it"):
            ClaimedDirectory(config(tmp_path), print)
        other.kill()
    with ClaimedDirectory(config(tmp_path), print):  # the lock ends with its process, whatever ends it
        pass


def test_nor_into_one_directory_of_checkpoints(tmp_path):
    shared = {"path": str(tmp_path / "shared")}
    with ClaimedDirectory(config(tmp_path, checkpoint=shared), print):
        other = config(tmp_path, checkpoint=shared, trainer={"output_dir": str(tmp_path / "other")})
        with pytest.raises(ConfigError, match=r"(?s)directory of checkpoints.*checkpoint\.path"):
            ClaimedDirectory(other, print)
    with ClaimedDirectory(other, print):
        pass


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"(?s)cannot be written.*trainer\.output_dir"):
        ClaimedDirectory(config(tmp_path), print)


def test_a_planted_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be written"):
        ClaimedDirectory(config(tmp_path), print)
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / "config.yaml").symlink_to(target)  # dangling
    with pytest.raises(ConfigError, match=r"(?s)not of an earlier run.*config\.yaml"):
        ClaimedDirectory(config(tmp_path), print)
    assert not target.exists()


def test_links_planted_in_a_run_are_replaced(tmp_path):
    path, target = run(tmp_path), tmp_path / "target"
    target.write_text("precious")
    for name in ("config.yaml", "patches.json", "metrics.jsonl"):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)
    given = config(tmp_path)
    with ClaimedDirectory(given, print) as claimed, RunDirectory.resume(claimed, given, 1, []) as directory:
        directory.write_patches({})
        directory.write_metrics({"step": 2})
    assert target.read_text() == "precious"
    assert not any((path / name).is_symlink() for name in ("config.yaml", "patches.json", "metrics.jsonl"))


@pytest.mark.parametrize("name", ["config.yaml", "images", "plots", "critic"])
def test_what_no_run_has_written_is_not_touched(tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    given = config(tmp_path, trainer={"output_dir": str(tmp_path / "run"), "overwrite": True})
    with pytest.raises(ConfigError, match=rf"(?s)not of an earlier run.*{name}"):
        ClaimedDirectory(given, print)
    assert (tmp_path / "run" / name).is_dir()


def test_clearing_deletes_what_a_run_has_written_and_nothing_else(tmp_path):
    path = run(tmp_path)
    (path / "notes.txt").write_text("mine")
    (path / "logs").mkdir()
    (path / ".hf.part").mkdir()
    (path / "hf.old").mkdir()
    with ClaimedDirectory(config(tmp_path), print) as claimed:
        assert set(claimed.earlier_files) == {"run.json", "config.yaml", "metrics.jsonl", "samples.jsonl"}
        claimed.clear(logs=True)
    assert {file.name for file in path.iterdir()} == {"notes.txt", "hf.old", ".lock"}


def test_a_run_that_failed_before_its_first_samples_is_not_in_the_way_and_its_logs_stay(tmp_path):
    given = config(tmp_path)
    for _ in range(2):
        with ClaimedDirectory(given, print) as claimed:
            assert claimed.earlier_files == []
            claimed.clear(logs=False)
            with RunDirectory.begin(claimed, given) as directory:
                (directory.path / "logs").mkdir(exist_ok=True)
                (directory.path / "logs" / "trainer-0.log").touch()


def test_a_damaged_record_is_an_error_that_names_it(tmp_path):
    path = run(tmp_path)
    (path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json"):
        ClaimedDirectory(config(tmp_path), print)


def test_which_files_overwriting_would_delete(tmp_path):
    assert overwritten(tmp_path, tmp_path / "config.yaml")
    assert overwritten(tmp_path, tmp_path / "logs" / "a.log")
    assert overwritten(tmp_path / "x" / "..", tmp_path / "hf" / "model.safetensors")
    assert overwritten(tmp_path / "run", tmp_path / "run")
    assert not overwritten(tmp_path, tmp_path / "data.jsonl")
    assert not overwritten(tmp_path / "run", tmp_path / "hf")
