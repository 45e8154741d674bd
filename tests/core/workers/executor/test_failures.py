"""Whatever befalls a worker, the driver says what it was, soon, and whether starting again can help."""

import os
import resource
import signal
import sys
import time

import pytest
import torch

from anytron.base.errors import DataError, ProcessLost, ResourceError, WorkerError
from anytron.workers.executor.group import PEER_LOST_S
from anytron.workers.executor.protocol import GroupSpec
from tests.core.workers.executor.processes import wait_until_gone


def pids_of(group):
    return [facts["pid"] for facts in group.call("describe")]


def test_a_rank_that_raises_ends_the_group_with_its_traceback(start):
    group = start(ranks=2)
    pids = pids_of(group)
    began = time.monotonic()

    with pytest.raises(WorkerError, match=r"Trainer rank 1 failed in fail\(\)") as caught:
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
        start().call("fail", 0, derived=True)

    assert type(caught.value) is DataError
    assert (caught.value.where, caught.value.fix) == ("here", "mend it")
    assert "DerivedError" in caught.value.__cause__.why
    assert "testchip_engine" not in sys.modules


def test_an_error_arrives_although_the_disk_is_too_full_for_the_log(start):
    group = start()
    (pid,) = pids_of(group)
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

    with pytest.raises(DataError, match="bad data"):
        group.call("fail", 0, derived=True)


def test_a_rank_that_is_gone_when_it_is_to_close_is_a_warning_and_no_error(start, caplog):
    group = start(ranks=2)
    pids = pids_of(group)
    os.kill(pids[0], signal.SIGKILL)

    group.close()

    assert group.ended
    assert wait_until_gone(pids)
    assert caplog.messages == ["Trainer rank 0 failed in close(): it was killed by SIGKILL."]


def test_a_rank_that_exits_is_reported_with_its_status_and_last_words(start):
    with pytest.raises(ProcessLost, match=r"rank 0 .* exited with status 3") as caught:
        start().call("exit", 0, 3)

    assert "last words of the engine" in caught.value.why


@pytest.mark.parametrize(
    "call",
    [("kill", 1), ("kill", 1, 1.5), ("die_after_the_answer", 1)],
    ids=["at once", "long after", "after its answer"],
)
def test_a_killed_rank_is_the_cause_although_its_peers_complain_first(start, call):
    group = start(ranks=2)
    pids = pids_of(group)
    began = time.monotonic()

    with pytest.raises(ProcessLost, match=r"rank 1 .* killed by SIGKILL") as caught:
        group.call(*call)

    assert "memory" in caught.value.fix
    assert time.monotonic() - began < PEER_LOST_S + 10
    assert wait_until_gone(pids)


def test_a_rank_killed_between_calls_is_noticed_by_the_next_and_its_log_outlives_the_next_start(
    make_executor, tmp_path
):
    executor = make_executor()
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    os.kill(*pids_of(group), signal.SIGKILL)

    with pytest.raises(ProcessLost, match=r"rank 0 .* killed by SIGKILL"):
        group.call("echo")

    executor.end()
    again = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    with pytest.raises(WorkerError) as caught:
        again.call("exit", 0, 3)
    log = (tmp_path / "run" / "logs" / "trainer-0.log").read_text()
    assert log.count("=== trainer rank 0 starts at ") == 2
    assert "=== trainer" not in caught.value.why, "the tail is that of this process"


def test_a_stopped_rank_is_found_by_its_heartbeat_with_its_stack(start):
    group = start(ranks=2, heartbeat_timeout_s=2.0)
    pids = pids_of(group)
    os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()

    with pytest.raises(ProcessLost, match=r"rank 1 .* no sign of life for \d+ s \(it is stopped\)") as caught:
        group.call("echo")

    assert time.monotonic() - began < 10
    assert "_serve" in caught.value.why
    assert "executor.heartbeat_timeout_s" in caught.value.fix
    assert wait_until_gone(pids)


@pytest.mark.slow
def test_a_stopped_rank_that_does_not_read_blocks_nobody(start):
    group = start(heartbeat_timeout_s=2.0)
    (pid,) = pids_of(group)
    os.kill(pid, signal.SIGSTOP)

    with pytest.raises(ProcessLost, match=r"rank 0 .* no sign of life"):
        group.call("echo", torch.zeros(1_000_000))

    assert wait_until_gone([pid])


def test_a_rank_that_hangs_is_reported_with_its_stack(start):
    group = start(ranks=2, call_timeout_s=3.0, heartbeat_timeout_s=2.0)
    pids = pids_of(group)

    with pytest.raises(ProcessLost, match=r"Trainer rank 1 did not answer .* within 3 s\.") as caught:
        group.call("hang_in_this_function", 1)

    assert "in hang_in_this_function" in caught.value.why
    assert "executor.call_timeout_s" in caught.value.fix
    assert wait_until_gone(pids)


def test_an_engine_that_cannot_be_built(start):
    with pytest.raises(WorkerError, match="could not start engine 'broken'") as caught:
        start(engine="broken").call("echo")

    assert type(caught.value) is WorkerError
    assert "RuntimeError: no such model" in caught.value.why


@pytest.mark.slow
def test_an_engine_that_takes_too_long_to_start(start):
    with pytest.raises(WorkerError, match=r"did not build engine 'slow' within 4 s\.") as caught:
        start(engine="slow", start_timeout_s=4.0, heartbeat_timeout_s=2.0).call("echo")

    assert type(caught.value) is WorkerError, "it would take as long again"
    assert "executor.start_timeout_s" in caught.value.fix


def test_an_answer_that_cannot_be_pickled_is_an_error_and_no_hang(start):
    with pytest.raises(WorkerError, match=r"rank 0 failed in unpicklable"):
        start().call("unpicklable")


def test_an_engine_that_cannot_be_built_again_ends_its_group(make_executor):
    executor = make_executor()
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    engine = executor._config.engine.model_copy(update={"options": {"refuse": "no second engine"}})

    with pytest.raises(WorkerError, match=r"failed in rebuild\(\)") as caught:
        group.rebuild(executor._config.model_copy(update={"engine": engine}))

    assert "no second engine" in caught.value.why
    assert group.ended


def test_too_few_descriptors_are_an_error_that_says_how_to_get_more(start):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled = [os.dup(0), os.dup(0)]
    while filled[-1] != filled[-2] + 1 or len(filled) < 64:  # none is left between others
        filled.append(os.dup(0))
    for descriptor in filled[-2:]:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1, hard))
    try:
        with pytest.raises(ResourceError, match=r"no file descriptors left") as caught:
            start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filled[:-2]:
            os.close(descriptor)

    assert caught.value.where == "start of trainer rank 0"
    assert "ulimit -n" in caught.value.fix


def test_no_log_is_written_through_a_link(start, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "trainer-0.log").symlink_to(precious)

    with pytest.raises(WorkerError, match=r"Trainer rank 0 could not be started") as caught:
        start()

    assert "remove the symbolic link" in caught.value.fix
    assert precious.read_text() == "mine"
