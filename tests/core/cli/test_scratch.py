"""The temporary directory of a command: nothing of it stays but the logs that an error names."""

import io
import tempfile

import pytest

from anytron.base.errors import EngineError
from anytron.cli.output import ScratchDirectory, VisibleConsole


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def work(error=None, *, logs=True, keep=False):
    """Use a directory as a command does; return what was said."""
    notes = VisibleConsole(io.StringIO(), soft_wrap=True)
    with ScratchDirectory("verify", notes) as scratch:
        assert scratch.path.name.startswith("anytron-verify-")
        (scratch.path / "initial_model").mkdir()
        (scratch.path / "run.yaml").touch()
        if logs:
            (scratch.path / "logs").mkdir()
            (scratch.path / "logs/trainer-0.log").write_text("all is well\n")
        if keep:
            scratch.keep_logs()
        if error is not None:
            raise error
    return notes.file.getvalue()


def test_nothing_stays(temporary):
    assert work() == ""
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_nothing_stays_after_ctrl_c_or_a_signal(temporary, error):
    with pytest.raises(type(error)):
        work(error)
    assert list(temporary.iterdir()) == []


def test_after_an_error_the_logs_stay(temporary):
    with pytest.raises(EngineError):
        work(EngineError("It does not work."))
    (left,) = temporary.iterdir()
    assert [path.relative_to(left).as_posix() for path in left.rglob("*")] == ["logs", "logs/trainer-0.log"]


def test_an_error_before_any_process_has_started_leaves_nothing(temporary):
    with pytest.raises(EngineError):
        work(EngineError("It does not work."), logs=False)
    assert list(temporary.iterdir()) == []


def test_logs_can_be_kept_and_it_is_said_where(temporary):
    said = work(keep=True)
    (left,) = temporary.iterdir()
    assert said == f"logs of the processes: {left / 'logs'}\n"
