"""What machines lack is named, with the machine, before a process starts; what does not matter lets a run train."""

import shutil

import pytest

from tests.machines.cluster import HEAD
from tests.machines.namespaces import NEEDS_MACHINES, OWN, address, name

pytestmark = NEEDS_MACHINES

TP2 = "parallel.tensor_model_parallel_size=2"
SOON_S = 90.0
"""Seconds in which a run says what machines lack: it imports its libraries first."""


def short(cluster, run, *settings, **further):
    return cluster.run(run, "trainer.total_steps=1", "trainer.save_hf=false", TP2, *settings, **further)


def no_process_was_started(cluster, output):
    """The driver's own processes, which try the rewards, have logs too."""
    cluster.clear()
    folders = [output, *(cluster.machines.path(machine, OWN) for machine in cluster.machines.numbers)]
    assert not [path for folder in folders for path in folder.rglob("trainer-*.log")]


def named(text):
    """The machines that an error names, besides the driver's."""
    return {one for one in (2, 3, 4) if f"{name(one)} ({address(one)})" in text}


def test_one_error_lists_all_machines_and_all_that_they_lack(cluster):
    said = short(cluster, "unshared", f"trainer.output_dir={OWN}/run", f"checkpoint.path={OWN}/checkpoints")
    text = said.fail(SOON_S)

    assert "The run cannot start on 2 of its machines." in text
    assert len(named(text)) == 2
    for one in named(text):
        for key, path in (("trainer.output_dir", f"{OWN}/run"), ("checkpoint.path", f"{OWN}/checkpoints")):
            assert (
                f"{name(one)} ({address(one)}) does not see the file that the driver ({name(HEAD)} ({address(HEAD)})) "
                f"has just written into {key}={path}"
            ) in text
    assert text.count("set checkpoint.path to a directory of a file system that all machines have mounted") == 1
    no_process_was_started(cluster, said.output)


def test_a_model_that_one_machine_does_not_have_is_named_with_the_machine(cluster):
    made = short(cluster, "makes-a-model").succeed()
    model = OWN / "model"
    machines = cluster.machines
    for machine in (HEAD, 2):
        shutil.copytree(made.output / "initial_model", machines.path(machine, model))
    try:
        said = short(cluster, "no-model", "model.config=null", "model.tokenizer=null", f"model.path={model}")
        text = said.fail(SOON_S)
    finally:
        for machine in (HEAD, 2):
            shutil.rmtree(machines.path(machine, model))
    lacking = [one for one in (3, 4) if f"{name(one)} ({address(one)}) has no model.path={model}" in text]
    assert lacking
    assert named(text) == set(lacking), "machine 2 has it"
    assert "copy model.path to the same path on every machine" in text
    no_process_was_started(cluster, said.output)


@pytest.mark.parametrize("own", ["127.0.1.1", ""], ids=["debian", "unknown"])
def test_to_what_a_machine_s_own_name_resolves_does_not_matter(cluster, own):
    """Debian's installer gives a machine's name to 127.0.1.1, and some machines cannot resolve theirs at all."""
    machines = cluster.machines
    for machine in machines.numbers:
        machines.hosts(machine, own=own, others=bool(own))
    try:
        short(cluster, f"names-{own or 'unknown'}").succeed()
    finally:
        for machine in machines.numbers:
            machines.hosts(machine)


def test_an_interface_that_leads_nowhere_is_not_taken(cluster):
    """Each machine has a second network, which its name resolves to, and nobody else is there."""
    machines = cluster.machines
    try:
        for machine in machines.numbers:
            for command in (
                "link add aaa0 type veth peer name aaa1",  # the first by its name
                f"addr add 172.31.{machine}.1/24 dev aaa0",
                "link set aaa0 up",
                "link set aaa1 up",
            ):
                machines.on(machine, "ip", *command.split())
            machines.hosts(machine, own=f"172.31.{machine}.1")
        short(cluster, "two-networks").succeed()
    finally:
        for machine in machines.numbers:
            machines.on(machine, "sh", "-c", "! ip link show aaa0 || ip link del aaa0")
            machines.hosts(machine)


def test_a_firewall_of_a_worker_is_named_with_the_machines_and_the_port(cluster):
    machines = cluster.machines
    for machine in (3, 4):
        machines.wall(machine)
    try:
        said = short(cluster, "wall-of-a-worker")
        text = said.fail(SOON_S)
    finally:
        for machine in (3, 4):
            machines.unwall(machine)
    walled = [one for one in (3, 4) if f"cannot connect to {name(one)} ({address(one)}) at port " in text]
    assert walled, text
    assert "where that machine listens: no answer within 5 s; a firewall drops or rejects new connections" in text
    no_process_was_started(cluster, said.output)


def test_a_firewall_of_the_driver_is_named_with_the_machines_and_the_port(cluster):
    cluster.machines.wall(HEAD)
    try:
        said = short(cluster, "wall-of-the-driver")
        text = said.fail(SOON_S)
    finally:
        cluster.machines.unwall(HEAD)
    assert f"cannot connect to {name(HEAD)} ({address(HEAD)}) at port " in text
    assert len(named(text)) == 1, "rank 0's machine"
    assert "a firewall drops or rejects new connections" in text
    no_process_was_started(cluster, said.output)
