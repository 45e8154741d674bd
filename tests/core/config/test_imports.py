"""References to functions in a configuration."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from anytron.base.errors import ConfigError
from anytron.base.functions import Called, Kind
from anytron.config.imports import resolve

ANY = Kind("k", Called("Anything"))

CODE = """
import dataclasses

@dataclasses.dataclass
class Thing:
    size: int = 3

def make():
    return Thing()

number = 5
"""


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "task.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "leaving.py").write_text("exit(0)\n")
    return tmp_path


def test_a_registered_name_comes_first():
    assert resolve("length", ANY, registered={"length": list}) is list


def test_a_function_of_a_module():
    assert (
        resolve("dataclasses:make_dataclass", Kind("k", Called("One", ("name", "fields"))))
        is dataclasses.make_dataclass
    )


def test_a_file_is_run_once(directory):
    make = resolve(f"{directory}/task.py:make", ANY)
    thing = make()
    assert thing.size == 3
    assert resolve(f"{directory}/../{directory.name}/task.py:make", ANY) is make
    assert pickle.loads(pickle.dumps(thing)) == thing


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("lenght", r"(?s)'lenght' is not registered.*rewards\[0\].function.*did you mean length"),
        ("zzz", "(?s)'zzz' is not registered.*'file.py:function'"),
        ("no_such_module_here:f", "(?s)no module 'no_such_module_here'.*name a file"),
        ("PATH/elsewhere.py:f", "(?s)no file .*elsewhere.py.*relative to the YAML file"),
        ("PATH/task.py:mak", "(?s)has no 'mak'.*did you mean make"),
        ("PATH/task.py:number", r"(?s)not a function.*int, in .*task\.py"),
        ("PATH/broken.py:f", "(?s)fails to run.*a_package_that_is_not_there.*broken.py., line 1"),
        ("PATH/leaving.py:f", "(?s)fails to run.*SystemExit: 0"),
    ],
)
def test_what_cannot_be_found_is_explained(directory, reference, message):
    with pytest.raises(ConfigError, match=message):
        resolve(reference.replace("PATH", str(directory)), ANY, key="rewards[0].function", registered={"length": list})


def test_a_module_that_lacks_a_dependency_is_not_called_missing(directory, monkeypatch):
    monkeypatch.syspath_prepend(directory)
    with pytest.raises(ConfigError, match=r"(?s)Module broken fails to import.*a_package_that_is_not_there"):
        resolve("broken:f", ANY)
    with pytest.raises(ConfigError, match=r"(?s)Module leaving fails to import.*SystemExit: 0"):
        resolve("leaving:f", ANY)


def test_a_file_of_the_current_directory_is_told_how_to_be_named(tmp_path, monkeypatch):
    """Shells complete paths from there, and those on the command line too are relative to the YAML file."""
    (tmp_path / "here" / "losses").mkdir(parents=True)
    for file in ("my.py", "losses/my.py"):
        (tmp_path / "here" / file).touch()
    monkeypatch.chdir(tmp_path / "here")
    for file in ("my.py", "losses/my.py"):
        with pytest.raises(ConfigError) as caught:
            resolve(f"{tmp_path}/config/{file}:loss", ANY)
        assert caught.value.fix.endswith(f"; for the file in the current directory, write {tmp_path}/here/{file}")
    with pytest.raises(ConfigError) as caught:
        resolve(f"{tmp_path}/config/other.py:loss", ANY)
    assert caught.value.fix == "correct the path, which is relative to the YAML file"
