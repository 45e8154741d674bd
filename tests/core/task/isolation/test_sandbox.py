"""What a program can do in a sandbox, tried by programs that want out; as this user, and as one without privileges."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from anytron.task.isolation import namespaces
from tests.core.task.isolation.conftest import LIMITS, USERS, someone_else

pytestmark = pytest.mark.timeout(900)


def test_a_program_reads_its_input_and_its_output_is_taken(run):
    ending = run("print(input()[::-1]); print(__name__)", "abc\n")
    assert ending == {"status": 0, "output": "cba\n__main__\n", "late": False}
    assert run("raise SystemExit(3)")["status"] == 3
    assert run("import os; os.abort()")["status"] != 0


REFUSED = {
    "a fork": "import os; os.fork()",
    "a program": "import subprocess; subprocess.run(['/bin/true'])",
    "a socket": "import socket; socket.socket()",
    "a local socket": "import socket; socket.socket(socket.AF_UNIX)",
    "a namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "memory without a name": "import os; os.memfd_create('x')",
    "memory of System V": "import ctypes\nif ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) < 0: raise OSError",
    "more memory": "x = bytearray(1 << 30)",
    "the interpreter's own files": "import os; open(os.__file__, 'a')",
    "a large file": "import os\nos.chdir('/tmp')\nopen(f'x{os.getpid()}', 'w').write('x' * (3 << 20))",
    "many files": "import os\nfiles = [os.open('/dev/null', 0) for _ in range(1000)]",
    "tracing": "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0): raise OSError",
}


@pytest.mark.some(12)
@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused(run, what):
    ending = run(REFUSED[what])
    assert ending["status"] != 0
    assert not ending["late"]


def test_without_the_filter_the_same_programs_would_get_through():
    """Programs that fail for another reason would show nothing."""
    for what in ("a fork", "a program", "a socket", "a local socket", "memory without a name"):
        assert subprocess.run([sys.executable, "-c", REFUSED[what]], check=False).returncode == 0, what


@pytest.mark.some(1)
def test_a_caller_may_have_any_number_of_open_files(run):
    for files in (1, 80, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 200):
        assert run("print(input())", "given", files=files)["output"] == "given\n", files


def test_it_sees_no_secret_and_no_open_file(run):
    program = """
import os
assert 'SECRET' not in os.environ and os.environ['HOME'] == '/tmp'
for descriptor in range(3, 64):
    try:
        os.fstat(descriptor)
    except OSError:
        continue
    raise AssertionError(descriptor)
"""
    assert run(program)["status"] == 0


def test_it_sees_none_of_the_machines_files_and_processes(run):
    if run.level == "reduced":  # says so
        assert run("open('/etc/passwd').read()")["status"] == 0
        return
    assert run("open('/etc/passwd').read()")["status"] == 1
    ending = run("import os; print(sorted(os.listdir('/')), os.listdir('/tmp'), os.getpid(), os.getppid())")
    seen = ending["output"].split("]")[0]
    assert not any(name in seen for name in ("'home'", "'proc'", "'sys'", "'var'", "'work'"))
    assert ending["output"].endswith("[] 2 1\n")


def test_it_reaches_no_other_process(run):
    victim = subprocess.Popen(["sleep", "600"], **someone_else())
    try:
        program = """
import os, signal
for process in (0, 1, -1, os.getppid(), VICTIM):
    try:
        os.kill(process, signal.SIGKILL)
    except OSError:
        pass
"""
        run(program.replace("VICTIM", str(victim.pid)))  # whose caller lives to tell
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_it_writes_into_no_other_process(run):
    """What a user may trace, its memory is a file that the user may write."""
    assert run("import os; open(f'/proc/{os.getppid()}/mem', 'r+b')")["status"] == 1


def test_it_changes_no_file_of_its_user(run):
    with tempfile.TemporaryDirectory(prefix="anytron-sandbox-") as folder:
        file = Path(folder, "file")
        file.write_text("mine", encoding="utf-8")
        Path(folder).chmod(0o777)
        file.chmod(0o666)
        changes = (
            "open(file, 'a').write('x')",
            "os.unlink(file)",
            "os.truncate(file, 0)",
            "os.mkdir(file + 'x')",
            "os.rename(file, file + 'x')",
            "os.chmod(file, 0)",
            "os.setxattr(file, 'user.x', b'x')",
        )
        for change in changes:
            assert run(f"import os; file = {str(file)!r}; {change}")["status"] == 1, change
        assert [one.name for one in Path(folder).iterdir()] == ["file"]
        assert file.read_text(encoding="utf-8") == "mine"


def test_it_is_built_for_nobody_whatever_root_hides(run):
    """With this umask, folders that root makes are closed to all others."""
    assert run("pass", umask=0o077)["status"] == 0


def below(process):
    """A process and all that it has started, as far as parents are alive."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended
            parents[int(file.parent.name)] = int(file.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    found = {process}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def name(process):
    """The short name of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{process}/cmdline").read_bytes():
            return Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip()
    return ""


@pytest.mark.parametrize("run", [*USERS, "reduced, by root"], indirect=True)
@pytest.mark.parametrize("kill", [os.killpg, os.kill], ids=["with its group", "alone"])
def test_nothing_is_left_when_its_caller_is_killed(run, kill):
    """As a reward's process is that takes too long, or when memory runs out: whatever a program does to outlive it."""
    program = """
import ctypes, os, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # not to be killed with its parent
try:
    os.setsid()
except OSError:
    pass
ctypes.CDLL(None).prctl(15, b'survivor', 0, 0, 0)
time.sleep(1000)
"""
    with run.begun(program) as caller:
        deadline = time.monotonic() + 120
        while "survivor" not in map(name, family := below(caller.pid)):
            assert time.monotonic() < deadline, family
            time.sleep(0.2)
        kill(caller.pid, signal.SIGKILL)
    while left := {one for one in family if name(one)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.some(1)
def test_loops_and_sleep_end(run):
    for program in ("while True: pass", "import time; time.sleep(1000)"):
        began = time.monotonic()
        ending = run(program, timeout_s=1.0)
        assert ending["late"] or ending["status"] == -9  # of processor time it has no more than that
        assert time.monotonic() - began < 25


def test_endless_output_ends_and_no_more_of_it_is_kept_than_allowed(run):
    ending = run("while True: print('x' * 1000)")
    assert ending["status"] != 0
    assert len(ending["output"]) <= 1 << 20


def test_threads_come_to_an_end(run):
    program = """
import threading, time
threading.stack_size(32768)
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        count += 1
except RuntimeError:
    print(count, flush=True)
import os
os._exit(0)
"""
    ending = run(program)
    if run.level == "full":
        assert 0 < int(ending["output"]) < 256
    else:
        assert ending["status"] == 0 or ending["status"] < 0


HOG = """
import ctypes, threading, time
threading.stack_size(65536)
try:
    while True:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
except RuntimeError:
    ctypes.CDLL(None).prctl(15, b'full', 0, 0, 0)
    time.sleep(1000)
"""


def threads(process):
    with contextlib.suppress(OSError):  # it may have ended
        return len(list(Path(f"/proc/{process}/task").iterdir()))
    return 0


def test_one_programs_threads_are_not_counted_against_another(run):
    if run.level == "reduced":  # where threads are not limited
        return
    # All others have namespaces of users. The user is one that no test beside this one has.
    sabotages = ["", f"one user for all: {20000 + os.getpid() % 20000}"] if run.by_root else [""]
    for sabotage in sabotages:
        with run.begun(HOG, sabotage=sabotage) as hog:
            try:
                deadline = time.monotonic() + 120
                while not (full := [one for one in below(hog.pid) if name(one) == "full"]):
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                assert max(map(threads, full)) > 250
                neighbour = (
                    "import threading\none = threading.Thread(target=print, args=('right',))\none.start()\none.join()"
                )
                ending = run(neighbour, sabotage=sabotage)
                assert (ending["status"] == 0 and ending["output"] == "right\n") is not bool(sabotage)
            finally:
                os.killpg(hog.pid, signal.SIGKILL)


BUFFERS = """
import contextlib, fcntl, os, socket
held, kept = 0, []
def fill(end):
    global held
    os.set_blocking(end, False)
    for size in (65536, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                held += os.write(end, b"x" * size)
def pairs():
    ends = socket.socketpair()
    kept.append(ends)
    with contextlib.suppress(OSError):
        ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    return [end.fileno() for end in ends]
def pipes():
    end = os.pipe()[1]
    with contextlib.suppress(OSError):
        fcntl.fcntl(end, 1031, 1 << 20)  # F_SETPIPE_SZ
    return [end]
for made in KIND, pipes:
    with contextlib.suppress(OSError):  # so many files may be open
        while True:
            for end in made():
                fill(end)
print(held / 2**20)
"""


def test_buffers_hold_little(run):
    """The kernel's memory, which no limit counts."""
    assert float(run(BUFFERS.replace("KIND", "pairs"))["output"]) < 20
    assert float(run(BUFFERS.replace("KIND", "pipes"))["output"]) < 20
    assert float(run(BUFFERS.replace("KIND", "pipes"), sabotage="larger buffers")["output"]) > 20


def test_root_becomes_a_user_of_its_own():
    known = b"         0          0 4294967295\n"
    found = {namespaces._stranger(number, known) for number in range(1, 1 << 22, 1009)}
    assert len(found) == len(range(1, 1 << 22, 1009))
    assert min(found) > 0x70000000
    container = b"0 1000 1\n1 100000 65536\n"  # of a user without privileges
    found = {namespaces._stranger(number, container) for number in range(1, 32768)}
    assert len(found) == 32767
    assert min(found) > 1
    assert max(found) <= 65536


def test_a_server_on_this_machine_is_out_of_reach(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")["status"] == 1


def test_a_kernel_that_allows_no_namespaces_is_said_and_nothing_runs(package, tmp_path):
    """As in a container: here the limit of namespaces is 0, in one of users of its own."""
    marker = Path(tempfile.mkdtemp()) / "ran"
    asked = json.dumps([{"level": "full", **LIMITS}, f"open({str(marker)!r}, 'w')", "", 0, ""])
    limit = "echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", f'{limit}; exec "$@"', "sh",
         sys.executable, "-B", str(package / "programs.py"), asked],
        env={"PYTHONPATH": str(package), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert json.loads(done.stdout)["unavailable"].startswith("separate namespaces: ")
    assert not marker.exists()
