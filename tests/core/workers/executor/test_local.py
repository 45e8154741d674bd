"""Worker processes start in the right order, answer, are reached by nobody else, and end."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from anytron.base.errors import ConfigError, WorkerError
from anytron.device.loading import open_session
from anytron.workers.executor.local import LocalExecutor
from anytron.workers.executor.protocol import GroupSpec
from tests.core.conftest import install_testchip
from tests.core.workers.executor.conftest import small_config
from tests.core.workers.executor.processes import LOOPBACK, is_alive, listening, wait_until_gone


class ImportsTheEngine:
    """Unpickling it tells what had happened in that process by then."""

    def __reduce__(self):
        return (eval, ("list(__import__('testchip').EVENTS)",))


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Two ranks, started where a file shadows the standard library, and what they said to the first call."""
    directory = tmp_path_factory.mktemp("current")
    (directory / "logging.py").write_text("raise ImportError('this is not the standard library')\n")
    with pytest.MonkeyPatch.context() as patch:
        install_testchip(patch)
        patch.chdir(directory)
        with LocalExecutor(small_config(directory / "run", None, {}), open_session(platform="testchip")) as executor:
            group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 2, 1))
            yield group, group.call("echo", ImportsTheEngine())


@pytest.fixture
def group(started):
    return started[0]


def test_nothing_of_ours_is_unpickled_before_the_engine_is_built(started):
    (_, (events,), _), _ = started[1]

    assert [event[0] for event in events] == ["imported", "patched", "built"]


def test_a_worker_is_built_in_order_and_told_who_it_is(group):
    first, second = group.call("describe")

    assert first["events"][:3] == [
        ("imported", False),  # plugins before torch
        ("patched", "trainer", False),  # patches before the engine's module
        ("built", 0),
    ]
    assert first["events"][-2:] == [("begin", "describe"), ("end", "describe")]  # calls are ranges in the profiler
    assert second["process"] == ("trainer", 1, 1, 2)
    assert second["env"]["TESTCHIP_RANK"] == "trainer:1/2"
    assert second["env"]["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert (second["env"]["RANK"], second["env"]["WORLD_SIZE"], second["env"]["LOCAL_RANK"]) == ("1", "2", "1")
    assert (first["platform"], first["patches"], first["steps"]) == ("testchip", ["testchip.mark"], 7)
    assert (first["threads"], first["env"]["OMP_NUM_THREADS"]) == (1, "1")


@pytest.mark.slow
def test_ranks_of_a_reward_model_are_training_ranks_for_plugins_and_have_a_configuration_of_their_own(
    make_executor, tmp_path
):
    executor = make_executor()
    config = small_config(tmp_path / "run", None, {})
    own = config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_steps": 3})})
    spec = GroupSpec("trainer", "anytron.training_engines", "small", 1, 1, model="reward_model", config=own)
    group = executor.start(spec)
    (facts,) = group.call("describe")
    assert facts["process"] == ("trainer", 0, 0, 1)
    assert facts["steps"] == 3
    assert (tmp_path / "run" / "logs" / "reward_model-0.log").is_file()
    with pytest.raises(WorkerError, match=r"Reward model rank 0 failed in no_such_method\(\)"):
        group.call("no_such_method")


def test_call_gives_the_same_to_all_and_scatter_to_each_its_own(group):
    assert group.size == 2
    assert group.call("echo", 1, key="x") == [(0, (1,), {"key": "x"}), (1, (1,), {"key": "x"})]
    assert group.scatter("echo", [((1,), ("b",)), ((0,), ("a",))]) == [(0, ("a",), {}), (1, ("b",), {})]


class Counted:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self):
        type(self).times += 1
        return int, (3,)


def test_a_share_is_encoded_once_for_all_its_ranks_and_only_when_it_is_sent(group, monkeypatch):
    monkeypatch.setattr(Counted, "times", 0)
    sent = []
    first = group._ranks[0]
    monkeypatch.setattr(first, "send", lambda message, send=first.send: sent.append(1) or send(message))

    def shares():
        yield (0,), ("a",)
        assert sent, "the first share is sent before the second is made"
        yield (1,), ("b",)

    assert group.scatter("echo", [((0, 1), (Counted(),))]) == [(0, (3,), {}), (1, (3,), {})]
    assert Counted.times == 1
    sent.clear()
    assert group.scatter("echo", shares()) == [(0, ("a",), {}), (1, ("b",), {})]


@pytest.mark.slow
def test_shares_that_cannot_be_made_end_the_group_and_their_error_is_raised(start):
    def shares():
        yield (0,), ("a",)
        raise OverflowError("too many tokens")

    group = start(2)
    with pytest.raises(OverflowError, match="too many tokens"):
        group.scatter("echo", shares())
    assert group.ended


@pytest.mark.slow
def test_every_rank_needs_its_arguments_once(start):
    group = start(1)
    with pytest.raises(ValueError, match=r"ranks \[0\] get no arguments, or get them twice"):
        group.scatter("echo", [((0, 0), ("a",))])
    assert group.ended


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("placement", "chips", "replica", "replicas", "sees"),
    [
        ("colocated", "4,5,6,7", 1, 2, "5"),
        ("colocated", "4,5,6,7", 0, 1, "4,5,6,7"),
        ("separate", "", 1, 2, "3"),
    ],
)
def test_a_replica_sees_the_devices_of_its_training_ranks_or_the_one_behind_all_of_theirs(
    testchip, tmp_path, monkeypatch, placement, chips, replica, replicas, sees
):
    session = open_session(platform="testchip")
    monkeypatch.setattr(type(session.platform), "visible_devices_variable", "CHIPS")
    monkeypatch.setenv("CHIPS", chips)
    config = small_config(tmp_path / "run", None, {}, data_parallel_size=2)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"placement": placement})})
    with LocalExecutor(config, session) as executor:
        group = executor.start(
            GroupSpec("rollout", "anytron.rollout_engines", "small", 1, 1, replica=replica, replicas=replicas)
        )
        assert group.call("describe")[0]["env"]["CHIPS"] == sees


def test_large_tensors_arrive_as_they_were(group):
    tensor = torch.randn(1000, 1000)

    for _, (back,), _ in group.call("echo", tensor):
        assert torch.equal(back, tensor)


def test_a_small_call_takes_well_below_a_millisecond(group):
    times = []
    for _ in range(200):
        began = time.perf_counter()
        group.call("echo", 1)
        times.append(time.perf_counter() - began)

    assert sorted(times)[len(times) // 10] < 1e-3  # most calls may wait for cores that others use


def test_a_schedulers_sigterm_leaves_workers_to_the_driver(group):
    for facts in group.call("describe"):
        os.kill(facts["pid"], signal.SIGTERM)

    assert len(group.call("echo")) == 2


def test_collectives_work_and_listen_on_the_loopback_interface_alone(group):
    assert group.call("meet") == [1, 1]

    for facts in group.call("describe"):
        addresses = listening(facts["pid"])
        assert addresses, "gloo listens"
        assert addresses <= LOOPBACK
        # Here the machine's name may resolve to the loopback address anyway.
        assert facts["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert "MASTER_PORT" not in facts["env"]


def test_a_group_that_was_built_again_meets_anew_and_close_ends_it_with_its_children(make_executor, tmp_path):
    executor = make_executor(engine_options={"closed": str(tmp_path / "closed")})
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 2, 1))
    before = group.call("describe")
    group.call("meet")
    config = executor._config

    group.rebuild(config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_steps": 8})}))

    after = group.call("describe")
    assert [(tmp_path / f"closed.{rank}").read_text() for rank in (0, 1)] == ["closed", "closed"]
    assert [facts["pid"] for facts in after] == [facts["pid"] for facts in before]
    assert [facts["steps"] for facts in before + after] == [7, 7, 8, 8]
    began = [event[0] for event in after[0]["events"] if event[0] not in ("begin", "end")]  # profiled ranges
    assert began == ["imported", "patched", "built", "built"]
    assert group.call("meet") == [1, 1], "the old store would be in the way"

    for rank in (0, 1):
        (tmp_path / f"closed.{rank}").unlink()
    pids = [facts["pid"] for facts in after] + group.call("child")
    executor.close()

    assert [(tmp_path / f"closed.{rank}").read_text() for rank in (0, 1)] == ["closed", "closed"]
    assert wait_until_gone(pids)


def test_a_failed_run_ends_processes_without_asking_engines(make_executor, tmp_path):
    executor = make_executor({"closed": str(tmp_path / "closed")})
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    pids = [facts["pid"] for facts in group.call("describe")]

    with pytest.raises(KeyboardInterrupt), executor:
        raise KeyboardInterrupt

    assert not (tmp_path / "closed.0").exists()
    assert wait_until_gone(pids)


def test_an_unknown_engine_is_found_before_any_process_starts(start):
    with pytest.raises(ConfigError, match=r"did you mean small"):
        start(engine="smal")


def test_workers_outlast_a_driver_that_is_stopped_and_end_with_one_that_is_killed(testchip, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        from anytron.config.schema import RunConfig
        from anytron.workers.executor.local import LocalExecutor
        from anytron.workers.executor.protocol import GroupSpec
        from anytron.device.loading import open_session
        config = RunConfig.model_validate(dict(
            model=dict(config=dict(model_type="none"), tokenizer="none"), data=dict(source="none"),
            rewards=[dict(function="none")], trainer=dict(output_dir={str(tmp_path / "run")!r}),
            executor=dict(heartbeat_timeout_s=2.0)))
        executor = LocalExecutor(config, open_session(platform="testchip"))
        group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
        group.call("meet")
        print(*[facts["pid"] for facts in group.call("describe")], flush=True)
        print(group.call("work", 1.0), flush=True)
        group.call("hang_in_this_function", 0)
        """)
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = {**os.environ, "TMPDIR": str(temporary)}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=variables)
    with driver:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 1
        driver.send_signal(signal.SIGSTOP)
        time.sleep(2 * 2.0)
        assert all(map(is_alive, pids))
        driver.send_signal(signal.SIGCONT)
        assert driver.stdout.readline() == "[0]\n"
        driver.kill()

    assert wait_until_gone(pids)
    assert list(temporary.iterdir()) == []
