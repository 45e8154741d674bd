"""An environment in which a worker cannot run is found before one is started."""

import sys

import pytest

from anytron import __version__
from anytron.base.version import installable
from anytron.run.preflight.machine import interpreter_diagnostics
from tests.core.other_environment import make_environment


def test_an_environment_with_this_version_of_anytron_is_accepted(tmp_path):
    python = make_environment(tmp_path / "venv", anytron=__version__)
    assert list(interpreter_diagnostics("rollout.python", str(python))) == []


@pytest.mark.parametrize(
    ("anytron", "message"),
    [(None, "No module named 'anytron'"), ("0.0.9", f"has Anytron 0.0.9, but this process runs {__version__}")],
)
def test_one_without_it_or_with_another_version_is_refused(tmp_path, anytron, message):
    python = make_environment(tmp_path / "venv", anytron=anytron)
    (found,) = interpreter_diagnostics("rollout.python", str(python))
    assert (found.severity, found.key) == ("error", "rollout.python")
    assert message in found.message
    assert found.fix == f"run {python} -m pip install {installable(__version__)}"


def test_what_is_no_interpreter_is_refused(tmp_path):
    (found,) = interpreter_diagnostics("rollout.python", str(tmp_path / "bin" / "python"))
    assert "cannot be run" in found.message


def test_a_program_that_prints_no_version_is_refused():
    (found,) = interpreter_diagnostics("rollout.python", "/bin/true")
    assert found.message == "Anytron cannot be imported with /bin/true: no output"


def test_nothing_of_the_current_directory_is_imported(tmp_path, monkeypatch):
    (tmp_path / "anytron.py").write_text("raise SystemExit('the current directory was asked')")
    monkeypatch.chdir(tmp_path)
    assert list(interpreter_diagnostics("rollout.python", sys.executable)) == []
