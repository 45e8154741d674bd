"""What is said of machines that lack something: pure comparison, and the one error."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError
from anytron_ray.findings import CLOCK_S, SCARCE, Machine, Obstacle, ahead, compared, described, partners, require
from anytron_ray.introduction import Doorstep, Introduction, Question, introduce, obstacles, written

SAID = Introduction(
    name="head",
    versions={"anytron": "1.2", "Python": "3.11.9", "torch": "2.13.0+cpu"},
    memory=8 * SCARCE,
    disks={"trainer.output_dir": 8 * SCARCE},
    unseen=(),
    missing=(),
)
DRIVER = Machine("10.0.0.1", None, SAID)
PATHS = {"trainer.output_dir": "/runs/sort", "model.path": "/models/small"}


def machine(number=2, **said):
    return Machine(f"10.0.0.{number}", "eth0", replace(SAID, name=f"m{number}", **said))


def found(one, obstacles=()):
    return compared(DRIVER, [one], PATHS, obstacles)


def test_a_machine_that_has_all_is_silent_and_torch_may_be_built_for_another_device():
    other = {**SAID.versions, "torch": "2.13.0+cu130"}
    assert found(machine(versions=other)) == []
    require([])


@pytest.mark.parametrize(
    ("name", "version", "fix"),
    [
        ("anytron", "1.3", "pip install anytron==1.2"),
        ("Python", "3.12.1", "with Python 3.11.9"),
        ("torch", "2.12.0+cpu", "pip install torch==2.13.0"),
        ("torch", "none", "pip install torch==2.13.0"),
    ],
)
def test_a_version_that_differs_from_the_drivers_is_found(name, version, fix):
    (finding,) = found(machine(versions={**SAID.versions, name: version}))
    assert finding.fatal
    assert f"has {name} {version}, but the driver (head (10.0.0.1)) has {SAID.versions[name]}" in finding.what
    assert fix in finding.fix


def test_one_error_lists_every_machine_and_what_it_lacks():
    machines = [
        machine(2, unseen=("trainer.output_dir",)),
        machine(3, unseen=("trainer.output_dir",), missing=("model.path",)),
        machine(4),
        replace(machine(5), said=None),
        machine(6, deaf="Cannot assign requested address"),
    ]
    wall = Obstacle(machines[2].name, machines[1].name, 40001, "no answer within 5 s")

    with pytest.raises(ConfigError, match="cannot start on 5 of its machines") as caught:
        require(compared(DRIVER, machines, PATHS, [wall]))

    assert caught.value.where == "m2 (10.0.0.2), m3 (10.0.0.3), 10.0.0.5, m6 (10.0.0.6), m4 (10.0.0.4)"
    lines = caught.value.why.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("m2 (10.0.0.2) does not see the file that the driver")
    assert lines[0].endswith("trainer.output_dir=/runs/sort")
    assert lines[2] == "m3 (10.0.0.3) has no model.path=/models/small"
    assert lines[3].startswith("10.0.0.5 did not answer in time")
    assert lines[4] == "m6 (10.0.0.6) cannot listen at its own address: Cannot assign requested address"
    assert "m4 (10.0.0.4) cannot connect to m3 (10.0.0.3) at port 40001" in lines[5]
    assert "a firewall" in lines[5]
    assert caught.value.fix.count("set trainer.output_dir to a directory") == 1, "two machines, one remedy"


def test_what_a_run_survives_is_no_error():
    late = replace(machine(memory=SCARCE - 1, disks={"trainer.output_dir": 0}), ahead_s=-CLOCK_S - 1)
    findings = found(late)
    assert [finding.fatal for finding in findings] == [False] * 3
    assert "has a clock that is 6.0 s behind the driver's" in findings[0].what
    assert "of memory free" in findings[1].what
    assert "of disk free at trainer.output_dir=/runs/sort" in findings[2].what
    require(findings)
    assert found(replace(machine(), ahead_s=CLOCK_S)) == []


def test_the_time_of_question_and_answer_is_taken_off_the_difference_of_clocks():
    assert ahead(clock=105.0, asked=100.0, answered=110.0) == 0.0
    assert ahead(clock=125.0, asked=100.0, answered=110.0) == 15.0
    assert ahead(clock=80.0, asked=100.0, answered=110.0) == -20.0


def test_machines_are_described_in_one_line():
    text = described(replace(machine(), ahead_s=7.25))
    for part in ("m2: anytron 1.2, Python 3.11.9, torch 2.13.0+cpu", "eth0", "7.2 s ahead of", "8.00 GiB of memory"):
        assert part in text
    assert "8.00 GiB of disk free at trainer.output_dir" in text


@pytest.mark.parametrize("machines", [1, 2, 17, 18, 200])
def test_each_machine_connects_to_few_and_each_is_reached(machines):
    chosen = [partners(one, machines) for one in range(machines)]
    assert all(one not in others for one, others in enumerate(chosen))
    assert max(map(len, chosen)) <= 17
    assert all(0 in others for others in chosen[1:]), "rank 0's machine"
    if machines > 1:
        assert {one for others in chosen for one in others} == set(range(machines))
    if machines <= 17:
        assert all(len(others) == machines - 1 for others in chosen), "all to all"


def test_a_note_is_seen_where_the_directory_is_shared_and_is_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr("anytron_ray.introduction.SEEN_S", 0.0)
    there, new = tmp_path / "there", tmp_path / "new" / "run"
    there.mkdir()
    with written({"trainer.output_dir": str(there), "checkpoint.path": str(new)}) as notes:
        assert Path(notes["trainer.output_dir"].path).parent == there
        assert Path(notes["checkpoint.path"].path).parent == tmp_path, "nothing is made"
        paths = {"model.path": str(there), "teacher.path": str(tmp_path / "none")}
        seen = introduce(Question(notes, paths, None), Doorstep())
        assert (seen.unseen, seen.missing, seen.port) == ((), ("teacher.path",), None)
        assert seen.name == socket.gethostname()
        assert set(seen.disks) == set(notes)
        other = replace(notes["trainer.output_dir"], text="of another driver")
        assert introduce(Question({"key": other}, {}, None), Doorstep()).unseen == ("key",)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert introduce(Question(notes, {}, None), Doorstep()).unseen == tuple(notes)


def test_a_note_that_appears_late_is_waited_for(tmp_path, monkeypatch):
    with written({"key": str(tmp_path)}) as notes:
        file = Path(notes["key"].path)
        hidden = file.rename(tmp_path / "hidden")
        monkeypatch.setattr("anytron_ray.introduction.time.sleep", lambda _: hidden.exists() and hidden.rename(file))
        assert introduce(Question(notes, {}, None), Doorstep()).unseen == ()


def test_a_directory_that_cannot_be_written_into_is_an_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("anytron_ray.introduction.open", fail, raising=False)
    with pytest.raises(ConfigError, match="cannot be written into") as caught, written({"key": str(tmp_path)}):
        pass
    assert caught.value.where == f"key={tmp_path}"


def test_a_door_is_reached_until_it_is_closed_and_silence_is_named():
    doorstep = Doorstep()
    said = introduce(Question({}, {}, "127.0.0.1"), doorstep)
    assert set(obstacles([("127.0.0.1", said.port)] * 300, within_s=60.0)) == {""}, "more than a queue holds"
    # Where nothing accepts, the kernel drops what comes when the queue is full.
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(2)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(full.getsockname())
    places = [("127.0.0.1", said.port), full.getsockname()]
    assert obstacles(places, within_s=0.3) == ["", "no answer within 0.3 s"]
    doorstep.close()
    assert obstacles(places[:1]) == ["Connection refused"]
    for one in [full, *waiting]:
        one.close()
    assert "assign" in introduce(Question({}, {}, "203.0.113.5"), doorstep).deaf
