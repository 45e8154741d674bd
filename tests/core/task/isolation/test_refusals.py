"""Calls that programs are refused are counted by name, whatever the programs do about it."""

import subprocess
import sys
import time

import pytest

from anytron.task.isolation import sandbox
from anytron.task.isolation.sandbox import Sandbox

pytestmark = pytest.mark.timeout(900)

PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    done = getattr(libc, arguments[0])(*arguments[1:])
    print(arguments[0], done, ctypes.get_errno())
"""
REFUSED = """
for _ in range(3):
    call("socket", 2, 1, 0)
call("ptrace", 0, 0, 0, 0)
call("sendmsg", 0, 0, 0)
call("kill", 1 << 20, 0)
call("syscall", 180)
"""
FLOOD = """
import threading, time
threading.stack_size(65536)
def flood():
    while True:
        libc.socket(2, 1, 0)
for _ in range(8):
    threading.Thread(target=flood, daemon=True).start()
time.sleep(1)
call("socket", 2, 1, 0)
"""


def test_refused_calls_are_counted_by_name(run):
    ending = run(PROBE + REFUSED)
    assert set(ending["output"].splitlines()) == {
        f"{name} -1 1" for name in ("socket", "ptrace", "sendmsg", "kill", "syscall")
    }
    assert ending["refused"] == {"socket": 3, "ptrace": 1, "sendmsg": 1, "kill": 1, "180": 1}
    assert "refused" not in run(PROBE + 'call("sendmsg", 64, 0, 0)\nos.getpid()'), "no call that is allowed is counted"
    assert "refused" not in run(PROBE + REFUSED, sabotage="nobody is asked")


@pytest.mark.some(1)
def test_a_flood_of_refused_calls_holds_up_nobody(run):
    ending = run(PROBE + FLOOD)
    assert (ending["status"], ending["late"], ending["refused"]) == (0, False, {"socket": 1000})
    assert ending["output"] == "socket -1 38\n", "ENOSYS: nobody answers any more"
    assert run(PROBE + FLOOD, sabotage="answers for ever")["refused"]["socket"] > 1000
    began = time.monotonic()
    assert run(PROBE + "while True: libc.socket(2, 1, 0)", timeout_s=1.0)["late"]
    assert time.monotonic() - began < 30


ASKED = """
import ctypes, os, sys
from anytron.task.isolation import allowed, seccomp
libc = ctypes.CDLL(None, use_errno=True)
rules = {**allowed.program(own_files=True, report=64), "seccomp": (), "prctl": ()}
listener = seccomp.allow_calls_and_ask(rules)
assert listener is not None
if sys.argv[1] == "gone":
    os.close(listener)
else:
    assert seccomp.allow_calls_and_ask(rules) is None
print(libc.socket(2, 1, 0), ctypes.get_errno())
"""


@pytest.mark.parametrize(("who", "refusal"), [("gone", "-1 38"), ("another", "-1 1")])
def test_calls_are_refused_where_nobody_can_be_asked(who, refusal):
    done = subprocess.run([sys.executable, "-c", ASKED, who], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == refusal, done.stderr


@pytest.mark.parametrize("level", ["full", "reduced"])
def test_a_program_that_has_ended_before_anyone_waits_for_it_has_ended_well(monkeypatch, level):
    """A busy machine lets the caller wait; a sandbox that could not be built is another thing."""
    wait = sandbox._wait
    monkeypatch.setattr(sandbox, "_wait", lambda *given: (time.sleep(1.0), wait(*given))[1])
    allowance = Sandbox(level, timeout_s=30.0, memory_gib=0.5, output_mib=1.0, site_packages=False)
    try:
        said = allowance.run("print('done')", "").output
    except sandbox.Unavailable as error:
        said = str(error).encode()
    # A stranger may not read the interpreter's folder, on some machines; what the kernel was asked for is no obstacle.
    assert said == b"done\n" or (level == "reduced" and b"\0" not in said), said
