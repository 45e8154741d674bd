"""Processes that start while the driver does something else: they import their engine, wait, and are used or ended."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError, ProcessLost, WorkerError
from anytron.workers.executor.protocol import GroupSpec
from tests.core.workers.executor.processes import offspring, wait_until_gone

ENTRY_POINTS = """
    [anytron.training_engines]
    talking = talking:INFO
"""
INFO = """
    from anytron.base.components import EngineInfo

    INFO = EngineInfo("talking_engine:Engine", imports=("imported_early",))
"""
EARLY = """
    import os
    from pathlib import Path

    print("imported early", flush=True)
    Path(__file__).with_name(f"warm-{os.getpid()}").touch()
"""
ENGINE = """
    import os

    print("the engine is imported", flush=True)


    class Engine:
        def __init__(self, context):
            print("the engine is built", flush=True)
            self.context = context

        def where(self):
            return os.getpid(), self.context.init_method

        def fail(self):
            print("last words", flush=True)
            os._exit(3)
"""
SPEC = GroupSpec("trainer", "anytron.training_engines", "talking", 2, 1)


@pytest.fixture
def folder(testchip, tmp_path, monkeypatch):
    """A folder with an engine that says what it does; workers find it as their driver does."""
    folder = tmp_path / "site"
    (folder / "talking-1.0.dist-info").mkdir(parents=True)
    (folder / "talking-1.0.dist-info" / "METADATA").write_text("Name: talking\nVersion: 1.0\n")
    files = {"talking-1.0.dist-info/entry_points.txt": ENTRY_POINTS, "talking.py": INFO}
    for name, text in {**files, "talking_engine.py": ENGINE, "imported_early.py": EARLY}.items():
        (folder / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def executor(folder, make_executor):
    return make_executor()


def wait_until_warm(folder):
    deadline = time.monotonic() + 60
    while len(list(folder.glob("warm-*"))) < SPEC.world_size:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def warm_workers(folder):
    """The processes once both have imported the engine: before, one may still be starting."""
    wait_until_warm(folder)
    return workers()


def workers():
    return [pid for pid in offspring(os.getpid()) if b"workers.executor" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def log_of(tmp_path, rank):
    return (tmp_path / "run" / "logs" / f"trainer-{rank}.log").read_text()


def test_a_group_is_built_in_the_processes_that_wait_for_it(executor, folder, tmp_path):
    executor.warm_up([SPEC])
    executor.warm_up([SPEC])
    warm = set(warm_workers(folder))
    assert len(warm) == 2, "one for each rank, however often they are asked for"
    assert not (tmp_path / "run").exists(), "nothing is written before the group is started"

    group = executor.start(SPEC)

    found = group.call("where")
    assert {pid for pid, _ in found} == warm
    assert len({meeting for _, meeting in found}) == 1
    for rank in range(2):
        first, *lines = log_of(tmp_path, rank).splitlines()
        assert first.startswith(f"=== trainer rank {rank} starts at ")
        assert lines == ["the engine is imported", "imported early", "the engine is built"]


def test_the_log_is_the_same_where_nothing_was_warmed_up(executor, tmp_path):
    executor.start(SPEC).call("where")
    assert log_of(tmp_path, 0).splitlines()[1:] == ["the engine is imported", "imported early", "the engine is built"]


@pytest.mark.slow
def test_a_second_group_of_the_same_description_has_processes_of_its_own(executor):
    executor.warm_up([SPEC])
    first, second = executor.start(SPEC), executor.start(SPEC)
    assert not {pid for pid, _ in first.call("where")} & {pid for pid, _ in second.call("where")}


@pytest.mark.slow
def test_another_description_is_not_taken_for_it(executor, folder):
    executor.warm_up([SPEC])
    warm = set(warm_workers(folder))
    one = executor.start(GroupSpec("trainer", "anytron.training_engines", "talking", 1, 1))
    assert {pid for pid, _ in one.call("where")}.isdisjoint(warm)


@pytest.mark.parametrize("how", ["end", "close"])
def test_processes_that_were_never_used_end_with_the_executor(executor, folder, how):
    executor.warm_up([SPEC])
    warm = warm_workers(folder)
    assert len(warm) == 2
    getattr(executor, how)()
    assert wait_until_gone(warm)


def test_an_engine_that_is_not_installed_is_refused_before_a_process_starts(executor):
    with pytest.raises(ConfigError, match="nowhere"):
        executor.warm_up([GroupSpec("trainer", "anytron.training_engines", "nowhere", 1, 1)])
    assert workers() == []


def test_an_import_that_fails_is_reported_by_the_first_call_and_is_in_the_log(executor, folder):
    (folder / "imported_early.py").write_text("print('one line', flush=True)\nraise ImportError('libfoo is missing')\n")
    executor.warm_up([SPEC])
    group = executor.start(SPEC)
    with pytest.raises(WorkerError, match="could not start engine 'talking'") as caught:
        group.call("where")
    assert "libfoo is missing" in caught.value.why
    assert "one line" in Path(caught.value.where).read_text()  # the other rank may end before it has imported that


def test_a_process_that_dies_while_it_waits_is_reported_with_its_output(executor, folder, tmp_path):
    executor.warm_up([SPEC])
    for pid in warm_workers(folder):
        os.kill(pid, signal.SIGKILL)
    group = executor.start(SPEC)
    with pytest.raises(ProcessLost, match="SIGKILL") as caught:
        group.call("where")
    assert "the engine is imported" in caught.value.why
    assert "the engine is imported" in log_of(tmp_path, 0), "what was in memory is kept"


@pytest.mark.slow
def test_the_tail_of_a_process_that_has_its_log_is_in_order(executor, tmp_path):
    executor.warm_up([SPEC])
    with pytest.raises(ProcessLost) as caught:
        executor.start(SPEC).call("fail")
    lines = caught.value.why.splitlines()
    assert [line for line in lines if "engine is" in line or "words" in line] == [
        "the engine is imported",
        "the engine is built",
        "last words",
    ]
    assert log_of(tmp_path, 0).count("the engine is imported") == 1


def test_what_an_import_redirects_the_output_to_is_left_alone(executor, folder, tmp_path):
    (tmp_path / "mine.txt").write_text("precious\n")
    redirects = f"import os\nos.dup2(os.open({str(tmp_path / 'mine.txt')!r}, os.O_WRONLY | os.O_APPEND), 1)\n"
    (folder / "imported_early.py").write_text(f"print('before', flush=True)\n{redirects}")
    executor.warm_up([SPEC])
    executor.start(SPEC).call("where")
    assert (tmp_path / "mine.txt").read_text() == "precious\n" + 2 * "the engine is built\n"
    assert log_of(tmp_path, 0).splitlines()[1:] == ["the engine is imported", "before"]


def test_a_process_that_cannot_be_started_leaves_no_descriptor(executor, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    gc.collect()  # what earlier tests left
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(WorkerError, match="could not be started"):
            executor.warm_up([SPEC])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_driver_that_is_killed_takes_its_waiting_processes_with_it(folder, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import time
        from pathlib import Path
        from anytron.device.loading import open_session
        from anytron.workers.executor.local import LocalExecutor
        from tests.core.workers.executor.conftest import small_config
        from tests.core.workers.executor.test_warm_up import SPEC, warm_workers
        config = small_config({str(tmp_path / "run")!r}, None, {{}})
        executor = LocalExecutor(config, open_session(platform="testchip"))  # without a name it would be collected
        executor.warm_up([SPEC])
        print(*warm_workers(Path({str(folder)!r})), flush=True)
        time.sleep(60)
        """)
    )
    paths = os.pathsep.join([str(folder), str(Path.cwd()), os.environ["PYTHONPATH"]])
    command, variables = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as driver:
        pids = [int(word) for word in driver.stdout.readline().split()]
        driver.kill()
    assert len(pids) == 2
    assert wait_until_gone(pids)
