"""Who may write into an output directory, and what is deleted there."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError, LostDirectoryError
from anytron.base.files import Lock
from anytron.config.schema import RunConfig
from anytron.record.tracking.claim import ClaimedDirectory, overwritten
from anytron.record.tracking.lines import read_jsonl
from anytron.record.tracking.record import RunRecord
from anytron.record.tracking.run_directory import RunDirectory


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
from anytron.base.files import Lock
lock = Lock(Path(sys.argv[1]) / ".lock")
print("locked", flush=True)
sys.stdin.read()
"""


def test_two_runs_do_not_write_into_one_directory(tmp_path):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=rf"(?s)Another run is writing.*process {other.pid} on .* holds its lock"):
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
    with pytest.raises(ConfigError, match=r"(?s)no earlier run wrote them.*config\.yaml"):
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
    with pytest.raises(ConfigError, match=rf"(?s)no earlier run wrote them.*{name}"):
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


def removed(path):
    shutil.rmtree(path)


def moved(path):
    path.rename(path.with_name("elsewhere"))


def replaced(path):
    moved(path)
    shutil.copytree(path.with_name("elsewhere"), path)  # what reads there finds the same


def emptied(path):
    for inside in path.glob("[!.]*"):  # as rm -rf OUT/* does: .lock stays
        removed(inside) if inside.is_dir() else inside.unlink()


def removed_with_its_parent(path):
    removed(path.parent)


def behind_a_file(path):
    removed(path)
    path.write_text("a file")


def unlocked(path):
    (path / ".lock").unlink()  # any run may take it now


@pytest.mark.parametrize(
    "harm",
    [removed, moved, replaced, emptied, removed_with_its_parent, behind_a_file, unlocked],
    ids=lambda one: one.__name__,
)
def test_a_directory_that_is_lost_is_noticed_and_what_was_written_is_rescued(tmp_path, harm):
    path = tmp_path / "runs" / "mine"
    given = config(
        tmp_path, trainer={"output_dir": str(path)}, validation={"sets": [{"name": "v", "data": {"source": "jsonl"}}]}
    )
    with ClaimedDirectory(given, print) as claimed, RunDirectory.begin(claimed, given) as directory:
        for step in (1, 2):
            directory.write_metrics({"step": step})
            directory.write_validation({"step": step})
        directory.require_place()
        harm(path)
        directory.write_metrics({"step": 3})  # into a file without a name, if need be
        with pytest.raises(LostDirectoryError, match=r"(?s)was removed or replaced.*mine"):
            directory.require_place()
        directory.log("a warning of the step is no error")
        directory.rescue()
        directory.require_place()
        directory.write_metrics({"step": 4})
        rescued = directory.path
    assert rescued.name.startswith("mine.rescued-")
    assert rescued.parent == (tmp_path if harm is removed_with_its_parent else path.parent)
    assert [record["step"] for record in read_jsonl(rescued / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [record["step"] for record in read_jsonl(rescued / "validation.jsonl")] == [1, 2]
    assert RunRecord.read(rescued).config["trainer"]["output_dir"] == str(rescued)


def test_a_lock_in_a_directory_that_is_removed_meanwhile_is_none(tmp_path, monkeypatch):
    flock = fcntl.flock

    def slow(descriptor, operation):
        (tmp_path / ".lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with pytest.raises(FileNotFoundError):
        Lock(tmp_path / ".lock")


def test_the_cause_of_an_error_in_a_lost_directory_is_said_and_another_runs_record_stays(tmp_path):
    given, path = config(tmp_path), tmp_path / "run"

    def lose_it():
        with ClaimedDirectory(given, print) as claimed, RunDirectory.begin(claimed, given) as directory:
            removed(path)
            path.mkdir()
            (path / "run.json").write_text("of another run")
            directory.plot()

    with pytest.raises(LostDirectoryError, match=r"trainer\.output_dir") as raised:
        lose_it()
    assert isinstance(raised.value.__cause__, OSError)
    assert (path / "run.json").read_text() == "of another run"


def test_a_rescue_that_fails_leaves_the_error_to_its_caller(tmp_path, monkeypatch):
    given = config(tmp_path)
    with ClaimedDirectory(given, print) as claimed, RunDirectory.begin(claimed, given) as directory:
        removed(directory.path)
        monkeypatch.setattr(Path, "mkdir", _full)
        with pytest.raises(OSError, match="No space left"):
            directory.rescue()
        assert directory.path == tmp_path / "run"


def _full(self, *arguments, **options):
    raise OSError(28, "No space left on device", str(self))
