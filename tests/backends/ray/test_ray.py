"""Ranks in a Ray cluster behave as ranks on this machine do, and Ray accounts for their devices."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from anytron.base.errors import ConfigError, DataError, ProcessLost, WorkerError
from anytron.device.loading import open_session
from anytron.workers.executor.protocol import GroupSpec
from anytron_cpu import CpuPlatform
from anytron_ray.executor import RayExecutor, passed_on
from tests.core.run.trainer.transfers import Started, install, transfer_config, watch_meetings
from tests.core.workers.executor.processes import is_alive, listeners, offspring, parent, wait_until_gone
from tests.listening import check, described, word


def judging(ranks):
    """The ranks of a reward model."""
    return GroupSpec("trainer", "anytron.training_engines", "small", ranks, 1, model="reward_model")


def free(ray, resource, count):
    """Whether so many become free: Ray learns of it a moment later."""
    deadline = time.monotonic() + 10
    while ray.available_resources().get(resource, 0) != count and time.monotonic() < deadline:
        time.sleep(0.05)
    return ray.available_resources().get(resource, 0) == count


def test_ranks_are_told_who_they_are_and_take_their_devices(ray, earlier, make_executor, tmp_path, monkeypatch, caplog):
    executor = make_executor(2, engine_options={"closed": str(tmp_path / "closed")})
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 2, 1))
    first, second = group.call("describe")

    assert second["process"] == ("trainer", 1, 1, 2)
    started = [event[0] for event in first["events"] if event[0] not in ("begin", "end")]  # profiled ranges
    assert started == ["imported", "patched", "built"]
    assert second["env"]["TESTCHIP_RANK"] == "trainer:1/2"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    assert [second["env"][name] for name in names] == ["1", "1", "2", "2", "1"]
    assert "RAY_RAYLET_PID" not in first["env"]
    assert first["env"]["GLOO_SOCKET_IFNAME"] == "lo", "both are on one machine"
    assert group.call("meet") == [1, 1]
    ranks = [facts["pid"] for facts in (first, second)]
    agents = dict.fromkeys(map(parent, ranks), "agent")
    found = described({os.getpid(): "driver", **agents, **dict.fromkeys(ranks, "training rank")}, but=earlier)
    check("a Ray cluster that runs already", found)
    assert free(ray, "CHIP", 0)

    monkeypatch.setattr("anytron_ray.cluster.PATIENCE_S", 0.5)
    with pytest.raises(WorkerError, match=r"did not place 1 processes within 1 s") as caught:
        make_executor(start_timeout_s=1.0).start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    assert "waiting up to 1 s for room in the Ray cluster for 1 processes with 1 CHIP, 1 CPU each" in caplog.text
    assert "each needs 1 CHIP, 1 CPU on one machine; free in the cluster: 0 CHIP" in caught.value.why

    rollout = executor.start(GroupSpec("rollout", "anytron.training_engines", "small", 1, 1))
    rollout.call("describe")
    slow, fast = rollout.submit("work", 1.0), group.submit("work", 0.2)
    assert executor.wait([slow, fast], timeout_s=0.0) == []
    assert executor.wait([slow, fast]) == [fast]
    assert (fast.result(), slow.result()) == ([0, 1], [0])
    ((_, (arrived,), _),) = rollout.call("echo", b"x" * 1_000_000)
    assert len(arrived) == 1_000_000
    assert group.scatter("echo", [((1,), ("b",)), ((0,), ("a",))]) == [(0, ("a",), {}), (1, ("b",), {})]
    stored = []
    monkeypatch.setattr(ray, "put", lambda message, put=ray.put: stored.append(len(message)) or put(message))
    got = [given for _, given, _ in group.scatter("echo", [((0, 1), (b"y" * 1_000_000,))])]
    assert got == [(b"y" * 1_000_000,)] * 2
    assert [size // 1_000_000 for size in stored] == [1], "one message for both ranks"

    group.rebuild(executor._config)
    assert group.call("describe")[0]["pid"] == first["pid"]
    assert group.call("meet") == [1, 1], "the old store would be in the way"

    executor.close()
    assert [(tmp_path / f"closed.{rank}").read_text() for rank in (0, 1)] == ["closed", "closed"]
    assert wait_until_gone([first["pid"], second["pid"]])
    assert free(ray, "CHIP", 2)
    assert (tmp_path / "run/logs/trainer-1.log").exists()


def test_more_ranks_than_the_cluster_has_devices_are_refused_before_anything_starts(make_executor, tmp_path):
    with pytest.raises(ConfigError, match=r"too few CHIP") as caught:
        make_executor(3)

    assert "needs 3 CHIP for 3 training ranks, but the cluster has 2" in caught.value.why
    assert """ray start --head --resources='{"CHIP": 3}'""" in caught.value.fix
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_devices_that_ray_gives_are_those_that_are_visible(make_executor, monkeypatch):
    monkeypatch.setenv("CHIPS", "7")
    executor = make_executor()
    monkeypatch.setattr(type(executor._session.platform), "visible_devices_variable", "CHIPS")
    executor._resource = "NPU"  # one of the resources of which Ray gives ids
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 2, 1))
    alone = executor.start(GroupSpec("rollout", "anytron.training_engines", "small", 1, 1))
    two = [
        executor.start(GroupSpec("rollout", "anytron.training_engines", "small", 1, 1, replica=i, replicas=2))
        for i in (0, 1)
    ]

    scoring = executor.start(judging(2))

    assert [facts["env"]["CHIPS"] for facts in group.call("describe") + alone.call("describe")] == ["0,1"] * 3
    seen = [(facts["env"]["CHIPS"], facts["env"]["LOCAL_RANK"]) for facts in scoring.call("describe")]
    assert seen == [("0,1", "0"), ("0,1", "1")], "each has the device of the training rank of its number"
    assert executor.start(judging(1)).call("describe")[0]["env"]["CHIPS"] == "0"
    assert [replica.call("describe")[0]["env"]["CHIPS"] for replica in two] == ["0", "1"]


@pytest.mark.slow
def test_a_replica_that_is_placed_apart_has_a_device_of_its_own(make_executor, monkeypatch):
    executor = make_executor(1)
    monkeypatch.setattr(type(executor._session.platform), "visible_devices_variable", "CHIPS")
    executor._resource, executor._apart = "NPU", True
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    rollout = executor.start(GroupSpec("rollout", "anytron.training_engines", "small", 1, 1))
    seen = [facts["env"]["CHIPS"] for facts in group.call("describe") + rollout.call("describe")]
    assert sorted(seen) == ["0", "1"]


@pytest.mark.slow
def test_a_platform_that_restricts_devices_to_others_is_refused(make_executor, monkeypatch):
    executor = make_executor()
    # Its hook sets this variable in every process.
    monkeypatch.setattr(type(executor._session.platform), "visible_devices_variable", "TESTCHIP_RANK")
    executor._resource = "NPU"

    with pytest.raises(ConfigError, match=r"TESTCHIP_RANK=trainer:0/1 conflicts with devices 0, which Ray assigned"):
        executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))


@pytest.mark.slow
def test_ranks_of_two_machines_are_counted_on_each(make_executor, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # tests have it; it decides
    executor = make_executor()
    executor._resource = "APART"
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 2))
    first, second = group.hosts
    assert first.id != second.id
    beside = [
        executor.start(
            GroupSpec("rollout", "anytron.training_engines", "small", 1, 1, replica=replica, replicas=replicas)
        ).hosts
        for replica, replicas in ((0, 1), (0, 2), (1, 2), (2, 3))
    ]
    assert beside == [[first], [first], [second], [second]]
    assert executor.start(judging(2)).hosts == group.hosts
    assert executor.host in (first, second)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert group.call("meet") == [1, 1]
    store, found = int(group.call("describe")[0]["init_method"].rpartition(":")[2]), set()
    for rank, facts in enumerate(group.call("describe")):
        for address, port in listeners(facts["pid"]):
            who = "training rank 0" if (rank, port) == (0, store) else "training rank"
            found.add((who, word(address, first.address)))
    assert word(first.address) == first.address
    check("ranks on several machines", found)
    told = [[facts["env"][name] for name in names] for facts in group.call("describe")]
    assert told == [["0", "0", "2", "1"], ["1", "0", "2", "1"]]
    assert {facts["threads"] for facts in group.call("describe")} == {len(os.sched_getaffinity(0))}


@pytest.mark.slow
def test_weights_go_over_the_network_to_another_machine_and_through_memory_on_one(ray, testchip, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    told = []
    # The driver's machine has all chips, and each machine one of those that are apart.
    for placement, resource in (("colocated", "CHIP"), ("separate", "APART")):
        output = tmp_path / placement
        (output / "exchange").mkdir(parents=True)
        rollout = {"engine": "taking", "placement": placement, "num_threads": 1}
        config = transfer_config(output, rollout=rollout, executor={"kind": "ray"})
        executor = RayExecutor(config, open_session(platform="testchip"))
        executor._resource = resource
        with executor, monkeypatch.context() as patches:
            seen = watch_meetings(patches, output, executor.host.address)
            started = Started(executor, config, output / "exchange")
            assert [started.give(), started.give()] == [1, 2]
            assert started.pool.describe() == [(2, [2.0])]
            (output / "rollout-dies-midway").touch()
            assert started.give(compared=True) == 3
            assert [type(error) for error in started.losses] == [ProcessLost]
            assert (started.pool.describe(), started.rest()) == ([(3, [3.0])], [])
        told += started.notes
    check("rollout processes on other machines", seen)
    assert [note.partition(":")[0] for note in told] == [
        "weights go to the rollout through shared memory",
        "weights go to the rollout over the network",
    ], told


def test_a_rank_that_is_killed_ends_the_group(ray, start):
    group = start(ranks=2)
    pids = [facts["pid"] for facts in group.call("describe")]

    with pytest.raises(ProcessLost, match=r"rank 0 failed in kill\(\): it was killed by SIGKILL") as caught:
        group.call("kill", 0)

    assert f"(machine {ray.util.get_node_ip_address()})" in caught.value.what
    assert "memory" in caught.value.fix
    assert caught.value.where.endswith(f"trainer-0.log on {ray.util.get_node_ip_address()}")
    assert wait_until_gone(pids)
    assert free(ray, "CHIP", 2)
    with pytest.raises(WorkerError, match="its processes have ended"):
        group.call("echo")


@pytest.mark.slow
def test_ranks_that_wait_for_ever_are_found_through_their_agents(start):
    with pytest.raises(ProcessLost, match=r"^Trainer rank 1 would wait for ever in follow\(\)") as caught:
        start(ranks=2, stall_timeout_s=1.0).call("follow", [[("all_reduce",)], [("all_reduce",), ("broadcast",)]])

    assert "in broadcast (gloo)" in caught.value.why


@pytest.mark.slow
def test_the_last_words_of_a_rank_that_exits_are_shown(start):
    with pytest.raises(WorkerError, match=r"rank 0 .* exited with status 3") as caught:
        start(ranks=1).call("exit", 0, 3)

    assert "last words of the engine" in caught.value.why


@pytest.mark.slow
def test_an_agent_that_is_gone_is_reported(ray, make_executor):
    executor = make_executor()
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    (facts,) = group.call("describe")
    ray.kill(group._agents.actors[0])

    def ask_until_it_is_gone():
        while True:  # ray.kill does not wait for the end of the agent, which may answer once more
            group.call("echo")

    with pytest.raises(
        ProcessLost, match=r"rank 0 failed in echo\(\): its Ray agent is gone \(machine [\d.]+\)"
    ) as caught:
        ask_until_it_is_gone()

    assert "actor" not in caught.value.what
    assert "Ray says: " in caught.value.why
    assert wait_until_gone([facts["pid"]])
    with pytest.raises(ProcessLost, match="could not open the store"):
        group.rebuild(executor._config)


@pytest.mark.slow
def test_a_node_that_is_lost_is_reported_and_others_take_its_place(ray, cluster, make_executor):
    node = cluster.add_node(num_cpus=1, num_gpus=0, resources={"SPARE": 1}, object_store_memory=100 << 20)
    executor = make_executor()
    executor._resource = "SPARE"
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    (facts,) = group.call("describe")
    cluster.remove_node(node)

    with pytest.raises(ProcessLost, match=r"rank 0 failed in echo\(\): its Ray agent is gone"):
        group.call("echo")
    with pytest.raises(ProcessLost, match=r"machine of training rank 0: the machine is gone"):
        executor.start(GroupSpec("rollout", "anytron.training_engines", "small", 1, 1))

    executor.end()
    assert wait_until_gone([facts["pid"]])
    cluster.add_node(num_cpus=1, num_gpus=0, resources={"SPARE": 1}, object_store_memory=100 << 20)
    again = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    assert again.call("echo") == [(0, (), {})]


@pytest.mark.slow
def test_a_stopped_rank_is_found_by_its_agent(start):
    group = start(ranks=1, heartbeat_timeout_s=2.0)
    (facts,) = group.call("describe")
    os.kill(facts["pid"], signal.SIGSTOP)

    with pytest.raises(ProcessLost, match=r"no sign of life for \d+ s \(it is stopped\)") as caught:
        group.call("echo")

    assert "_serve" in caught.value.why
    assert wait_until_gone([facts["pid"]])


def test_other_machines_get_a_list_of_the_drivers_variables():
    class Chip(CpuPlatform):
        environment_prefixes = ("CHIP_",)

    names = ("CHIP_DEBUG", "HF_HOME", "HF_TOKEN", "MY_SECRET", "MY_WISH", "PYTHONPATH", "WANDB_API_KEY")

    passed = passed_on(dict.fromkeys(names, "x"), Chip(), ["MY_WISH"])

    assert list(passed) == ["CHIP_DEBUG", "HF_HOME", "MY_WISH", "PYTHONPATH"]


@pytest.mark.slow
def test_a_cluster_that_a_run_starts_listens_on_the_loopback_interface_alone(tmp_path):
    code = """
import ray
from anytron_ray.cluster import start_here
start_here()
print(ray.get_runtime_context().get_node_id(), flush=True)
input()
"""
    short = tempfile.mkdtemp()  # the names of Ray's sockets would be too long below tmp_path
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    variables |= {"RAY_TMPDIR": short, "HOME": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, env=variables, **pipes) as driver:
        assert driver.stdout.readline().strip()
        found = described({driver.pid: "driver", **dict.fromkeys(offspring(driver.pid), "Ray's own")})
        driver.communicate("\n")
    shutil.rmtree(short)

    check("a Ray cluster that the run starts", found)


def test_an_error_for_people_arrives_as_itself(start):
    with pytest.raises(DataError, match="bad data") as caught:
        start(ranks=1).call("fail", 0, derived=True)

    assert (caught.value.where, caught.value.fix) == ("here", "mend it")
    assert "DerivedError" in caught.value.__cause__.why


@pytest.mark.slow
def test_a_rank_that_hangs_is_reported_with_its_stack(start):
    group = start(ranks=1, call_timeout_s=2.0)
    pids = [facts["pid"] for facts in group.call("describe")]

    with pytest.raises(WorkerError, match=r"Trainer rank 0 did not answer .* within 2 s") as caught:
        group.call("hang_in_this_function", 0)

    assert "in hang_in_this_function" in caught.value.why
    assert wait_until_gone(pids)


@pytest.mark.slow
def test_workers_end_when_the_driver_is_killed(ray, testchip, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        from anytron.config.schema import RunConfig
        from anytron.workers.executor.protocol import GroupSpec
        from anytron.device.loading import open_session
        from anytron_ray.executor import RayExecutor
        config = RunConfig.model_validate(dict(
            model=dict(config=dict(model_type="none"), tokenizer="none"), data=dict(source="none"),
            rewards=[dict(function="none")], trainer=dict(output_dir={str(tmp_path / "run")!r})))
        executor = RayExecutor(config, open_session(platform="testchip"))
        group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
        print(*[facts["pid"] for facts in group.call("describe")], flush=True)
        group.call("hang_in_this_function", 0)
        """)
    )
    address = ray.get_runtime_context().gcs_address
    variables = {**os.environ, "RAY_ADDRESS": address}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=variables)
    with driver:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 1
        assert all(map(is_alive, pids))
        driver.kill()

    assert wait_until_gone(pids)
    assert free(ray, "CHIP", 2)


def test_a_cluster_that_is_named_and_cannot_be_joined_is_an_error():
    code = "from anytron_ray.cluster import connect; connect()"
    variables = {**os.environ, "RAY_ADDRESS": "nonsense"}  # one of which Ray would try to reach takes minutes

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=False)

    assert "ConfigError: Could not connect to the Ray cluster." in done.stderr
    assert "RAY_ADDRESS=nonsense" in done.stderr


def test_without_ray_the_error_says_how_to_install_it(make_executor, monkeypatch):
    monkeypatch.setattr("anytron_ray.executor.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install 'anytron\[ray\]'"):
        make_executor(1)
