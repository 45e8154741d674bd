"""Worker processes start in the right order, answer, and never leave the driver waiting."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from anytron.config.schema import RunConfig
from anytron.errors import ConfigError, DataError, ProcessLost, WorkerError


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


class ImportsTheEngine:
    """Unpickling it tells what had happened in that process by then."""

    def __reduce__(self):
        return (eval, ("list(__import__('testchip').EVENTS)",))


def test_a_worker_is_built_in_order_and_told_who_it_is(start):
    first, second = start(ranks=2).call("describe")

    assert first["events"] == [
        ("imported", False),  # plugins before torch
        ("patched", "trainer", False),  # patches before the engine's module
        ("built", 0),
        ("begin", "describe"),  # each call is a range in the device's profiler
        ("end", "describe"),
    ]
    assert second["process"] == ("trainer", 1, 1, 2)
    assert second["env"]["TESTCHIP_RANK"] == "trainer:1/2"
    assert second["env"]["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert (second["env"]["RANK"], second["env"]["WORLD_SIZE"], second["env"]["LOCAL_RANK"]) == ("1", "2", "1")
    assert first["env"]["MASTER_PORT"] == second["env"]["MASTER_PORT"]
    assert (first["platform"], first["patches"], first["steps"]) == ("testchip", ["testchip.mark"], 7)
    assert (first["threads"], first["env"]["OMP_NUM_THREADS"]) == (1, "1")


def test_nothing_of_ours_is_unpickled_before_the_engine_is_built(start):
    ((_, (events,), _),) = start(ranks=1).call("echo", ImportsTheEngine())

    assert [event[0] for event in events] == ["imported", "patched", "built"]


def test_call_gives_the_same_to_all_and_scatter_to_each_its_own(start):
    group = start(ranks=2)

    assert group.size == 2
    assert group.call("echo", 1, key="x") == [(0, (1,), {"key": "x"}), (1, (1,), {"key": "x"})]
    assert group.scatter("echo", [("a",), ("b",)]) == [(0, ("a",), {}), (1, ("b",), {})]
    with pytest.raises(ValueError, match="1 sets of arguments for 2 ranks"):
        group.scatter("echo", [("a",)])


def test_large_tensors_arrive_as_they_were(start):
    tensor = torch.randn(1000, 1000)

    ((_, (back,), _),) = start(ranks=1).call("echo", tensor)

    assert torch.equal(back, tensor)


def test_a_small_call_takes_well_below_a_millisecond(start):
    group = start(ranks=1)
    group.call("echo")
    times = []
    for _ in range(200):
        began = time.perf_counter()
        group.call("echo", 1)
        times.append(time.perf_counter() - began)

    assert sorted(times)[len(times) // 2] < 1e-3


def test_a_rank_that_raises_ends_the_group_with_its_traceback(start):
    group = start(ranks=2)
    pids = [facts["pid"] for facts in group.call("describe")]
    began = time.monotonic()

    with pytest.raises(WorkerError, match=r"trainer rank 1 failed in fail\(\)") as caught:
        group.call("fail", 1)

    assert type(caught.value) is WorkerError, "it would raise again"
    assert "ValueError: engine says no" in caught.value.why
    assert "testchip_engine.py" in caught.value.why
    assert time.monotonic() - began < 10
    assert wait_until_gone(pids)
    with pytest.raises(WorkerError, match="its processes have ended"):
        group.call("echo")


def test_an_error_for_people_arrives_as_itself_even_if_its_class_is_the_workers_own(start):
    with pytest.raises(DataError, match="bad data") as caught:
        start(ranks=1).call("fail", 0, derived=True)

    assert type(caught.value) is DataError
    assert (caught.value.where, caught.value.fix) == ("here", "mend it")
    assert "DerivedError" in caught.value.__cause__.why
    assert "testchip_engine" not in sys.modules


def test_a_rank_that_exits_is_reported_with_its_status_and_last_words(start):
    with pytest.raises(ProcessLost, match=r"rank 1 .* exited with status 3") as caught:
        start(ranks=2).call("exit", 1, 3)

    assert "last words of the engine" in caught.value.why


def test_a_rank_killed_during_a_call_ends_the_group(start):
    group = start(ranks=2)
    pids = [facts["pid"] for facts in group.call("describe")]
    began = time.monotonic()

    with pytest.raises(ProcessLost, match=r"rank 0 .* killed by SIGKILL") as caught:
        group.call("kill", 0)

    assert "memory" in caught.value.fix
    assert time.monotonic() - began < 10
    assert wait_until_gone(pids)


def test_a_rank_killed_between_calls_is_noticed_by_the_next(start):
    group = start(ranks=2)
    os.kill(group.call("describe")[1]["pid"], signal.SIGKILL)

    with pytest.raises(ProcessLost, match=r"rank 1 .* killed by SIGKILL"):
        group.call("echo")


def test_a_rank_that_hangs_is_reported_with_its_stack(start):
    group = start(ranks=2, call_timeout_s=2.0)
    pids = [facts["pid"] for facts in group.call("describe")]

    with pytest.raises(ProcessLost, match=r"trainer rank 1 did not answer .* within 2 s") as caught:
        group.call("hang_in_this_function", 1)

    assert "in hang_in_this_function" in caught.value.why
    assert "executor.call_timeout_s" in caught.value.fix
    assert wait_until_gone(pids)


def test_a_stopped_rank_that_does_not_read_is_a_timeout_too(start):
    group = start(ranks=1, call_timeout_s=1.0)
    pid = group.call("describe")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)

    with pytest.raises(ProcessLost, match=r"did not answer"):
        group.call("echo", torch.zeros(1_000_000))

    assert wait_until_gone([pid])


def test_an_engine_that_cannot_be_built(start):
    with pytest.raises(WorkerError, match="could not start engine 'broken'") as caught:
        start(ranks=2, engine="broken").call("echo")

    assert "RuntimeError: no such model" in caught.value.why


def test_an_engine_that_takes_too_long_to_start(start):
    with pytest.raises(WorkerError, match=r"did not build engine 'slow' within 6 s") as caught:
        start(ranks=1, engine="slow", start_timeout_s=6.0).call("echo")

    assert "executor.start_timeout_s" in caught.value.fix


def test_an_unknown_engine_is_found_before_any_process_starts(start):
    with pytest.raises(ConfigError, match=r"did you mean small"):
        start(engine="smal")


def test_an_answer_that_cannot_be_pickled_is_an_error_and_no_hang(start):
    with pytest.raises(WorkerError, match=r"rank 0 failed in unpicklable"):
        start(ranks=1).call("unpicklable")


def test_rebuild_closes_the_engines_and_builds_others_in_the_same_processes(make_executor, tmp_path):
    executor = make_executor(engine_options={"closed": str(tmp_path / "closed")})
    group = executor.start("trainer", "anytron.training_engines", "small", 2, 1)
    before = group.call("describe")
    config = executor._config

    group.rebuild(config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_steps": 8})}))

    after = group.call("describe")
    assert [(tmp_path / f"closed.{rank}").read_text() for rank in (0, 1)] == ["closed", "closed"]
    assert [facts["pid"] for facts in after] == [facts["pid"] for facts in before]
    assert [facts["steps"] for facts in before + after] == [7, 7, 8, 8]
    started = [event[0] for event in after[0]["events"] if event[0] not in ("begin", "end")]  # profiled ranges
    assert started == ["imported", "patched", "built", "built"]
    ports = [facts["env"]["MASTER_PORT"] for facts in before + after]
    assert ports[0] == ports[1] != ports[2] == ports[3], "the old store may still be there"


def test_an_engine_that_cannot_be_rebuilt_ends_its_group(start):
    group = start(ranks=2, engine="small")
    config = RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "none"}, "tokenizer": "none"},
            "data": {"source": "none"},
            "rewards": [{"function": "none"}],
            "engine": {"options": {"refuse": "no second engine"}},
        }
    )

    with pytest.raises(WorkerError, match=r"failed in rebuild\(\)") as caught:
        group.rebuild(config)

    assert "no second engine" in caught.value.why
    assert group.ended


def test_close_lets_engines_close_and_ends_processes_and_their_children(make_executor, tmp_path):
    executor = make_executor(engine_options={"closed": str(tmp_path / "closed")})
    group = executor.start("trainer", "anytron.training_engines", "small", 2, 1)
    pids = [facts["pid"] for facts in group.call("describe")] + group.call("child")

    executor.close()

    assert [(tmp_path / f"closed.{rank}").read_text() for rank in (0, 1)] == ["closed", "closed"]
    assert wait_until_gone(pids)


def test_a_failed_run_ends_processes_without_asking_engines(make_executor, tmp_path):
    executor = make_executor({"closed": str(tmp_path / "closed")})
    group = executor.start("trainer", "anytron.training_engines", "small", 1, 1)
    pids = [facts["pid"] for facts in group.call("describe")]

    with pytest.raises(KeyboardInterrupt), executor:
        raise KeyboardInterrupt

    assert not (tmp_path / "closed.0").exists()
    assert wait_until_gone(pids)


def test_workers_end_when_the_driver_is_killed(testchip, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        from pathlib import Path
        from anytron.config.schema import RunConfig
        from anytron.executor.local import LocalExecutor
        from anytron.plugins import open_session
        config = RunConfig.model_validate(dict(
            model=dict(config=dict(model_type="none"), tokenizer="none"), data=dict(source="none"),
            rewards=[dict(function="none")], trainer=dict(output_dir={str(tmp_path / "run")!r})))
        executor = LocalExecutor(config, open_session(platform="testchip"))
        group = executor.start("trainer", "anytron.training_engines", "small", 2, 1)
        print(*[facts["pid"] for facts in group.call("describe")], flush=True)
        group.call("hang_in_this_function", 0)
        """)
    )
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    with driver:
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        driver.kill()

    assert wait_until_gone(pids)
