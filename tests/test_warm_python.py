"""A forked program sees what one that was started from nothing sees, and ends in the same way."""

import ast
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import COLD, WARM
from tests.warm_python import WORKERS, StartedCold, WarmPopen, end_server

SHOWN = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv, "variable": os.environ.get("SHOWN"), "directory": os.getcwd(), "name": __name__,
    "path": sys.path[0], "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid(),
    "open": sorted(int(number) for number in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{number}") and int(number) < 500),
}))
"""


@pytest.fixture(params=[StartedCold, WarmPopen], ids=["cold", "warm"])
def started(request, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", request.param)
    return request.param


@pytest.mark.parametrize("new_session", [False, True])
def test_arguments_environment_directory_and_descriptors(started, tmp_path, new_session):
    (tmp_path / "shown.py").write_text(SHOWN)
    reader, writer = os.pipe()
    try:
        for command in (["-c", SHOWN, "a", "b"], [str(tmp_path / "shown.py"), "a", "b"], ["-m", "shown", "a", "b"]):
            done = subprocess.run(
                [sys.executable, *command],
                capture_output=True, text=True, check=True, cwd=tmp_path, env={**os.environ, "SHOWN": "1"},
                pass_fds=[writer], start_new_session=new_session,
            )  # fmt: skip
            shown = json.loads(done.stdout)
            first = {"-c": "-c"}.get(command[0], str(tmp_path / "shown.py"))
            folder = {"-c": ""}.get(command[0], str(tmp_path))
            assert shown == {
                "arguments": [first, "a", "b"], "variable": "1", "directory": str(tmp_path), "name": "__main__",
                "path": folder, "group": new_session, "session": new_session, "open": [0, 1, 2, writer],
            }  # fmt: skip
            assert done.stderr == ""
    finally:
        os.close(reader)
        os.close(writer)


def test_descriptors_with_large_numbers_arrive(started):
    """A process that has started hundreds of others has such numbers; the server moves its own out of their way."""
    pipes = {}
    for reader, writer in (os.pipe() for _ in range(20)):
        pipes[fcntl.fcntl(writer, fcntl.F_DUPFD, 510)] = reader
        os.close(writer)
    program = f"import os\nfor number in {list(pipes)}: os.write(number, str(number).encode())"
    with started([sys.executable, "-c", program], pass_fds=list(pipes), start_new_session=True) as process:
        status = process.wait(30)
    for number in pipes:
        os.close(number)
    assert status == 0
    assert [os.read(reader, 100) for reader in pipes.values()] == [str(number).encode() for number in pipes]
    for reader in pipes.values():
        os.close(reader)


def test_its_group_can_be_ended_as_soon_as_it_has_a_number(started):
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import os; os._exit(4)", 4, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit, sys; atexit.register(lambda: print('last', file=sys.stderr))", 0, "last\n"),
    ],
)
def test_ends(started, code, status, says):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-len(says) :] if says else done.stderr) == (status, says)


def test_signals_waiting_and_input(started):
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert sleeping.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeping.wait(0.1)
    os.killpg(sleeping.pid, signal.SIGKILL)
    assert sleeping.wait() == sleeping.poll() == -signal.SIGKILL

    doubled = [sys.executable, "-c", "print(input() * 2)"]
    assert subprocess.run(doubled, input="ab\n", capture_output=True, text=True, check=True).stdout == "abab\n"


def test_what_a_program_starts_is_warm_too_and_other_options_start_from_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
    other_seed = {**os.environ, "PYTHONHASHSEED": "7"}
    loaded = "import sys; print('torch' in sys.modules)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {loaded!r}], check=True)"
    for command, variables, expected in (
        (["-c", loaded], None, "True\n"),
        (["-c", nested], None, "True\n"),
        (["-W", "ignore", "-c", loaded], None, "True\n"),
        (["-I", "-c", loaded], None, "False\n"),
        (["-c", loaded], other_seed, "False\n"),
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, env=variables)
        assert done.stdout == expected


@pytest.fixture
def other_servers(monkeypatch):
    """Other servers than this process has: those hold ranks that later tests use."""
    monkeypatch.setattr(WarmPopen, "requests", [])
    monkeypatch.setattr(WarmPopen, "servers", [])
    yield
    end_server()


@pytest.mark.slow
@pytest.mark.usefixtures("other_servers")
def test_the_worker_of_a_reward_has_what_it_needs_and_nothing_else(monkeypatch):
    """Also if the test that started the servers had another path."""
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", "/where/others/may/be")
        assert WarmPopen([sys.executable, "-c", ""]).wait() == 0
    unknown = "import sys; sys.exit('/where/others/may/be' in sys.path)"
    assert WarmPopen([sys.executable, "-c", unknown]).wait() == 0
    imported = "import sys; print(*(name in sys.modules for name in ('anytron.task.rewards.registered', 'torch')))"
    for worker, path, expected in (
        (WORKERS[0], os.environ.get("PYTHONPATH", ""), "True False\n"),
        ("another", os.environ.get("PYTHONPATH", ""), "False True\n"),
        (WORKERS[0], "/where/others/may/be", "False True\n"),
    ):
        command = [sys.executable, "-c", imported, worker, "3", "4"]
        variables = {**os.environ, **({"PYTHONPATH": path} if path else {})}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
        assert done.stdout == expected


@pytest.mark.parametrize("told", [False, True], ids=["before it is told", "before it reads what it is told"])
def test_the_server_outlives_one_that_is_killed_before_it_hears_of_its_program(told):
    assert WarmPopen([sys.executable, "-c", ""]).wait() == 0
    request = {
        "arguments": ["-c", "import time; time.sleep(0.5)"], "variables": dict(os.environ), "directory": "/",
        "group": None, "descriptors": [],
    }  # fmt: skip
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not told:
        ours.close()
    with theirs:
        socket.send_fds(WarmPopen.requests[0], [json.dumps(request).encode()], [theirs.fileno()])
    if told:
        assert select.select([ours], [], [], 60)[0]
        ours.close()
    time.sleep(1)
    assert WarmPopen([sys.executable, "-c", "raise SystemExit(7)"]).wait() == 7


def warm_measurements(text: str) -> list[str]:
    """The tests of a source file that measure the memory of programs and do not start them from nothing."""
    tests = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [
        test.name
        for test in tests
        if test.name.startswith("test_")
        and re.search(r"\bmemory=True|RUSAGE_CHILDREN|wait4", ast.unparse(test))
        and "started_cold" not in {argument.arg for argument in test.args.args}
    ]


def test_memory_is_measured_of_programs_that_start_from_nothing():
    """A fork of 250 MB passed a limit of 250 MB on most machines."""
    root = Path(__file__).parents[1]
    files = [path for path in (root / "tests").rglob("test_*.py") if str(path.relative_to(root)).startswith(WARM)]
    cold = {root / name for name in COLD}
    assert {
        path.name: found for path in files if path not in cold and (found := warm_measurements(path.read_text()))
    } == {}
    harness = (root / "tests/benchmarks/test_harness.py").read_text()
    assert len(warm_measurements(harness.replace("started_cold", ""))) == 3, "the rule can fail"
