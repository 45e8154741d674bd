"""Machines of a real cluster that lack something, as far as nodes on one machine can."""

import contextlib
from dataclasses import replace

import pytest

from anytron.base.errors import ConfigError, ProcessLost
from anytron.workers.executor.protocol import GroupSpec
from anytron_ray import machines
from anytron_ray.findings import Machine
from anytron_ray.introduction import Introduction, written


@pytest.mark.slow
def test_what_machines_lack_is_one_error_before_a_process_starts(ray, make_executor, tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "written", unseen)
    monkeypatch.setattr(machines, "paths_read", lambda _: {"model.path": str(tmp_path / "model")})

    with pytest.raises(ConfigError, match="cannot start on 1 of its machines") as caught:
        make_executor(2).start(GroupSpec("trainer", "anytron.training_engines", "small", 2, 1))

    shared, missing = caught.value.why.splitlines()
    name = f"({ray.util.get_node_ip_address()})"
    assert f"{name} does not see the file that the driver" in shared
    assert shared.endswith(f"has just written into trainer.output_dir={tmp_path / 'run'}")
    assert missing.endswith(f"{name} has no model.path={tmp_path / 'model'}")
    assert not (tmp_path / "run/logs").exists(), "no process was started"


@pytest.mark.slow
def test_a_machine_that_does_not_say_whom_it_reaches_is_not_taken_for_one_that_reaches_all(ray, monkeypatch):
    said = Introduction("there", {}, 0, {}, (), (), port=1234)
    both = [Machine(address, None, said) for address in ("192.0.2.1", "192.0.2.2")]
    answers = iter([[[""], None], [None, None]])
    monkeypatch.setattr(machines, "_asked", lambda *_: next(answers))

    with pytest.raises(ProcessLost, match=r"^there \(192\.0\.2\.2\) did not say in time"):
        machines._unreached([], both, None)


@contextlib.contextmanager
def unseen(directories):
    """Files that no machine sees: this machine's own file system cannot be hidden from its agents."""
    with written(directories) as notes:
        yield {key: replace(note, text="another") for key, note in notes.items()}
