"""Lists of allowed system calls: what the kernel makes of them, and what another processor's would."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import anytron
from anytron.task.isolation import allowed, seccomp
from anytron.task.isolation.call_numbers import MACHINES
from tests.core.task.isolation.conftest import interpreter, someone_else
from tests.core.task.isolation.record import calls_of, confined

ALLOW, KILL, REFUSE, ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
PROFILES = {
    "full": lambda: allowed.program(own_files=True, report=64),
    "reduced": lambda: allowed.program(own_files=False, report=64),
    "verifier": allowed.verifier,
}


def verdict(program, audit, number, arguments):
    """Run a filter as ``classic BPF`` is defined (Documentation/networking/filter.rst of Linux)."""
    words = {0: number, 4: audit}
    for place, argument in enumerate(arguments):
        words[16 + 8 * place], words[20 + 8 * place] = argument & 0xFFFFFFFF, argument >> 32
    at = value = 0
    while True:
        code, if_so, if_not, k = program[at]
        at += 1
        if code == 0x20:
            value = words[k]
        elif code == 0x54:
            value &= k
        elif code == 0x05:
            at += k
        elif code == 0x06:
            return k
        else:
            at += if_so if {0x15: value == k, 0x35: value >= k}[code] else if_not


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_filter_says_of_every_number_what_its_list_says(profile, machine):
    rules, one = PROFILES[profile](), MACHINES[machine]
    program = seccomp.instructions(rules, one.calls, one.audit)
    assert len(program) < 4096  # BPF_MAXINSNS
    asking = [(*rest, ASK if (rest[0], k) == (0x06, REFUSE | errno.EPERM) else k) for *rest, k in program]
    assert asking != program
    assert seccomp.instructions(rules, one.calls, one.audit, refusal=ASK) == asking
    assert all(0 <= step <= 255 for _, *steps, _ in program for step in steps)
    names = {number: name for name, number in one.calls.items() if name in rules}
    for number in range(1024):
        conditions = rules[names[number]] if number in names else None
        if conditions is None:
            refusal = REFUSE | (errno.EPERM if number < 424 else errno.ENOSYS)
            assert verdict(program, one.audit, number, [0] * 6) == refusal, number
            continue
        right, wrong = [0xFFFFFFFFFFFFFFFF] * 6, [0] * 6
        for where in conditions:
            shift = 32 * where.high
            right[where.argument] &= ~(0xFFFFFFFF << shift)
            right[where.argument] |= where.values[0] << shift
        assert verdict(program, one.audit, number, right) == ALLOW, names[number]
        for where in conditions:
            shift = 32 * where.high
            for bit in range(32):
                for value in where.values:
                    if not (where.mask >> bit & 1) or (value ^ (1 << bit)) in where.values:
                        continue
                    wrong = list(right)
                    wrong[where.argument] &= ~(0xFFFFFFFF << shift)
                    wrong[where.argument] |= (value ^ (1 << bit)) << shift
                    found = verdict(program, one.audit, number, wrong)
                    assert found == REFUSE | errno.EPERM, (names[number], value, bit)
    assert verdict(program, one.audit, 0x40000000, [0] * 6) == KILL  # x32
    assert verdict(program, 0x40000003, 20, [0] * 6) == KILL  # i386


def test_numbers_are_those_of_the_kernels_headers():
    """Where they lie; the calls since 2019 have one number everywhere, and some headers are older than they."""
    places = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}
    for machine, place in places.items():
        header = Path("/usr/include") / place
        calls = MACHINES[machine].calls | MACHINES[machine].others
        assert len(set(calls.values())) == len(MACHINES[machine].calls) + len(MACHINES[machine].others)
        if header.exists():
            text = header.read_text(encoding="utf-8")
            found = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
            found["newfstatat"] = found.get("newfstatat", found.get("fstatat", -1))
            old = {name for name in calls if calls[name] < 424}
            assert {name: found.get(name) for name in old} == {name: calls[name] for name in old}
    new = [{name: number for name, number in one.calls.items() if number >= 424} for one in MACHINES.values()]
    assert new[0] == new[1]
    names = set().union(*(rules() for rules in PROFILES.values())) | {"seccomp"}
    assert names == MACHINES["x86_64"].calls.keys()  # without a number a call would be refused, and not be missed
    lacking = (
        "access alarm arch_prctl chmod creat dup2 epoll_create epoll_wait eventfd futimesat getdents getpgrp link "
        "lstat mkdir open pause pipe poll readlink rename rmdir select signalfd stat symlink time unlink utime utimes"
    )
    assert names - MACHINES["aarch64"].calls.keys() == set(lacking.split())


def test_another_processor_is_refused_by_name(monkeypatch):
    machine = os.uname_result(("Linux", "here", "6", "1", "riscv64"))
    monkeypatch.setattr(os, "uname", lambda: machine)
    with pytest.raises(OSError, match="system calls of riscv64 are not known"):
        seccomp.allow_calls({})


@pytest.fixture(scope="module", params=["as this user", "without privileges"])
def escapes(request):
    """How each attempt ends: with the filter, and with one that lacks what refuses it."""
    folder = Path(tempfile.mkdtemp(prefix="anytron-allowed-"))
    isolation = Path("anytron", "task", "isolation")
    shutil.copytree(Path(anytron.__file__).parents[1] / isolation, folder / isolation)
    (folder / "anytron" / "__init__.py").touch()
    (folder / "anytron" / "task" / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("escaping.py"), folder)
    folder.chmod(0o755)
    python, user = (sys.executable, {}) if request.param == "as this user" else (interpreter(), someone_else())
    done = subprocess.run(
        [python, "-B", str(folder / "escaping.py")],
        env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False, cwd="/", **user,
    )  # fmt: skip
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("profile", PROFILES)
def test_what_tells_changes_or_takes_anything_is_refused(escapes, profile):
    assert len(escapes[profile]) >= 25
    assert {name for name, (whole, _) in escapes[profile].items() if whole != "refused"} == set()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_filter_that_lacks_the_entry_would_be_noticed(escapes, profile):
    """Attempts that fail for another reason would show nothing."""
    assert {name for name, (_, sabotaged) in escapes[profile].items() if sabotaged != "through"} == set()


TRACE = """\
10 openat(AT_FDCWD, "/etc/x", O_RDONLY) = 3
10 seccomp(SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, {len=9, filter=0x1}) = 0
10 clone(child_stack=0x1, flags=CLONE_VM|CLONE_THREAD <unfinished ...>
11 socket(AF_UNIX, SOCK_STREAM, 0) = 4
10 <... clone resumed>) = 12
12 socket(AF_UNIX, SOCK_STREAM, 0) = -1 EPERM (Operation not permitted)
10 clone3(0x1, 88) = -1 ENOSYS (Function not implemented)
10 openat(AT_FDCWD, "/etc/x", O_RDONLY) = -1 ENOENT (No such file or directory)
"""


def test_the_recorder_counts_what_confined_processes_call():
    made, refused = calls_of(confined(TRACE.splitlines()))
    assert made == {"clone": 1, "openat": 1}
    assert refused == {"socket": 1, "clone3": 1}
