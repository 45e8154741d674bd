"""Machines that are namespaces of this one: network, mounts, host name, IPC and processes of their own.

They are joined by a bridge in a network namespace of its own, which has no way out. Nothing is left when the process
that made them ends, however it ends: each machine is killed with its parent, and the kernel keeps nothing of it.

Needs the right to make namespaces (root), and ``unshare``, ``nsenter``, ``setpriv``, ``ip``, ``iptables``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest
from typing_extensions import Self

from tests.house import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ASKED = "ANYTRON_MACHINES"
"""The variable with which ``tox -e machines`` asks for these tests."""
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "iptables", "timeout")
HIDDEN = ("/tmp", "/root", "/home", "/dev/shm", "/var/tmp", "/srv", "/run")
"""Folders that each machine has for itself, empty at first."""
SHARED = Path("/srv/shared")
"""A folder that all machines share."""
OWN = Path("/srv/own")
"""A folder that a machine has for itself; the current one of its processes."""
READY = "/run/ready"
DELAY = Path(__file__).with_name("slow_wire.py")


def obstacle() -> str:
    """Say why these tests are skipped: they were not asked for, or the system forbids machines. Empty = they run.

    Raises:
        FileNotFoundError: They were asked for, and a program that can be installed is missing.
    """
    if not os.environ.get(ASKED):
        return f"{ASKED} is not set: tox -e machines"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise FileNotFoundError(
            f"not found on PATH: {', '.join(missing)}; install iproute2, iptables, util-linux and coreutils"
        )
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "sh", "-c", "hostname m0 && mount -t tmpfs tmpfs /srv"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"this system makes no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


_OBSTACLE = obstacle()
NEEDS_MACHINES = [
    pytest.mark.machines,
    pytest.mark.skipif(bool(_OBSTACLE), reason=_OBSTACLE),
    pytest.mark.timeout(600, method="signal"),  # with the output of the test, and its fixtures are taken down
]


def address(machine: int) -> str:
    """The address of a machine."""
    return f"10.78.0.{machine}"


def name(machine: int) -> str:
    """The host name of a machine."""
    return f"m{machine}"


def until(condition: Callable[[], object], within_s: float, what: str) -> None:
    """Wait for something.

    Raises:
        AssertionError: It did not come in time.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)


@dataclass(frozen=True)
class Process:
    """A process on a machine.

    Attributes:
        pid: Its number on the machine that has the machines.
        command: Its command line.
        output: The file that it writes to, as far as it can be known: that of a worker is its log.
    """

    pid: int
    command: str
    output: str

    def kill(self) -> None:
        """Kill it, as ``kill -9`` does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Machines:
    """Machines numbered from 1. Use it as a context manager.

    Args:
        number: How many.
        scratch: An empty folder for what they share and for what their processes write.
        variables: Environment variables of all processes on them, besides those of Python and Ray.
    """

    def __init__(self, number: int, scratch: Path, variables: Mapping[str, str] | None = None) -> None:
        self.numbers = range(1, number + 1)
        self.shared = scratch / "shared"
        self._scratch = scratch
        self._variables = variables or {}
        self._inits: dict[int, int] = {}
        self._holders: list[subprocess.Popen[bytes]] = []
        self._wires: dict[int, subprocess.Popen[bytes]] = {}
        self._switch = 0

    def __enter__(self) -> Self:
        self.shared.mkdir(parents=True)
        try:
            self._switch = self._hold(["unshare", "-n"], ["sleep", "infinity"])
            until(lambda: _namespace(self._switch, "net") != _namespace(os.getpid(), "net"), 10.0, "a network")
            self._ip("link set lo up", "link add br0 type bridge", "link set br0 up")
            for machine in self.numbers:
                self.up(machine)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in reversed(self._holders):
            holder.kill()
            holder.wait()

    def up(self, machine: int) -> None:
        """Start a machine that is not there, with its cable plugged in and a hosts file that names all of them."""
        keep = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
        kept = [path for path in dict.fromkeys(keep) if str(path).startswith(tuple(f"{one}/" for one in HIDDEN))]
        script = f"""
            set -eu
            mount --make-rprivate /
            hostname {name(machine)}
            mkdir -p /mnt
            mount -t tmpfs tmpfs /mnt
            mkdir /mnt/shared; mount --bind '{self.shared}' /mnt/shared
            {_lines(f"mkdir /mnt/{n}; mount --bind '{path}' /mnt/{n}" for n, path in enumerate(kept))}
            {_lines(f"mount -t tmpfs -o size=4g tmpfs {path}" for path in HIDDEN if Path(path).is_dir())}
            {_lines(f"mkdir -p '{path}'; mount --bind /mnt/{n} '{path}'" for n, path in enumerate(kept))}
            mkdir -p {SHARED} {OWN}; mount --bind /mnt/shared {SHARED}
            touch /run/hosts /run/resolv
            mount --bind /run/hosts /etc/hosts; mount --bind /run/resolv /etc/resolv.conf
            touch {READY}
            trap : TERM INT
            while :; do sleep 3600 & wait || :; done
        """
        outer = self._hold(
            ["unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "--mount-proc", "--kill-child"], ["sh", "-c", script]
        )
        until(lambda: _children(outer), 10.0, f"machine {machine}")
        init = self._inits[machine] = _children(outer)[0]
        until(lambda: Path(f"/proc/{init}/root{READY}").exists(), 10.0, f"the mounts of machine {machine}")
        self._ip(
            # The address of hardware stays that of the machine: the others remember it.
            f"link add v{machine} type veth peer name eth0 address 02:00:00:00:00:{machine:02x} netns {init}",
            f"link set v{machine} master br0 up",
        )
        self.on(machine, "ip", "link", "set", "lo", "up")
        self.on(machine, "ip", "addr", "add", f"{address(machine)}/24", "dev", "eth0")
        self.on(machine, "ip", "link", "set", "eth0", "up")
        self.on(machine, "ip", "route", "add", "default", "via", address(254))
        self.hosts(machine)

    def is_up(self, machine: int) -> bool:
        """Whether a machine is there."""
        return machine in self._inits

    def off(self, machine: int) -> None:
        """Shut a machine off: all its processes are gone at once."""
        init = self._inits.pop(machine)
        os.kill(init, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{init}").exists(), 30.0, f"the end of machine {machine}")
        # The kernel takes down a namespace a moment after its last process.
        until(lambda: f"v{machine}@" not in self._ip("link"), 30.0, f"the end of the cable of machine {machine}")

    def hosts(self, machine: int, *, own: str | None = None, others: bool = True) -> None:
        """Write the hosts file of a machine.

        Args:
            machine: The machine.
            own: The address that its own name has there; None = the one in the network, empty = its name is unknown.
            others: Whether the names of the other machines are there.
        """
        lines = {name(other): address(other) for other in self.numbers if others and other != machine}
        if own != "":
            lines[name(machine)] = own or address(machine)
        text = "127.0.0.1 localhost\n" + "".join(f"{where} {who}\n" for who, where in lines.items())
        (self._root(machine) / "run/hosts").write_text(text)

    def unplug(self, machine: int) -> None:
        """Pull the cable out."""
        self._ip(f"link set v{machine} down")

    def plug(self, machine: int) -> None:
        """Plug the cable in again."""
        self._ip(f"link set v{machine} up")

    def wall(self, machine: int, ports: str = "32768:60999") -> None:
        """Let the machine's firewall drop new connections from outside at some ports."""
        self.on(machine, *f"iptables -A INPUT -i eth0 -p tcp --syn --dport {ports} -j DROP".split())

    def unwall(self, machine: int) -> None:
        """Take all rules of the machine's firewall away."""
        self.on(machine, "iptables", "-F")

    def slow(self, machine: int, delay_s: float, loss: float) -> None:
        """Put a slow wire between a machine and the others: each frame is late, and some are lost.

        It is a program, because not every kernel has netem.

        Args:
            machine: The machine.
            delay_s: Seconds by which a frame is late, in each direction.
            loss: The part of the frames that is lost.
        """
        here, there = f"a{machine}", f"b{machine}"
        inside = ["nsenter", "-t", str(self._switch), "-n"]
        command = [*inside, sys.executable, str(DELAY), here, there, str(delay_s), str(loss)]
        self._wires[machine] = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command])
        self._holders.append(self._wires[machine])
        # With colons, because "b4" may also be a part of a device's hardware address.
        until(lambda: f": {there}: " in self._ip("link"), 10.0, "the slow wire")
        self._ip(
            f"link add w{machine} type bridge",
            *(f"link set {one} up" for one in (f"w{machine}", here, there)),
            f"link set {there} master br0",
            f"link set {here} master w{machine}",
            f"link set v{machine} master w{machine}",
        )

    def fast(self, machine: int) -> None:
        """Take the slow wire away."""
        self._ip(f"link set v{machine} master br0", f"link del w{machine}")
        wire = self._wires.pop(machine)
        wire.kill()
        wire.wait()

    def start(
        self, machine: int, *command: str, into: IO[bytes] | int | None = None, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on a machine; return the process that waits for it there. Ending that one does not end it."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH")])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(OWN),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            **self._variables,
            **variables,
        }
        inside = ["nsenter", "-t", str(self._inits[machine]), "-n", "-m", "-u", "-i", "-p", "--"]
        cleared = ["env", "-i", *(f"{key}={value}" for key, value in environment.items())]
        process = subprocess.Popen(
            [*inside, *cleared, "sh", "-c", f'cd {OWN}; exec "$@"', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=into,
            stderr=subprocess.STDOUT,
        )
        self._holders.append(process)
        return process

    def on(self, machine: int, *command: str, within_s: float = 60.0, **variables: str) -> str:
        """Run a command on a machine; return what it wrote.

        Raises:
            AssertionError: It failed, or took too long.
        """
        process = self.start(
            machine, "timeout", "-s", "KILL", f"{within_s:g}", *command, into=subprocess.PIPE, **variables
        )
        text = process.communicate()[0].decode(errors="replace")
        assert process.returncode == 0, f"{' '.join(command)} on machine {machine}: {process.returncode}\n{text}"
        return text

    def processes(self, machine: int, words: str) -> list[Process]:
        """The processes of a machine that have these words in their command line; none if the machine is off."""
        if machine not in self._inits:
            return []
        mine = _namespace(self._inits[machine], "pid")
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        found = [_process(number) for number in numbers if _namespace(number, "pid") == mine]
        return [one for one in found if one is not None and words in one.command]

    def path(self, machine: int, path: Path) -> Path:
        """Where a path of a machine is seen from here."""
        return self._root(machine) / str(path).lstrip("/")

    def _root(self, machine: int) -> Path:
        return Path(f"/proc/{self._inits[machine]}/root")

    def _hold(self, unshare: list[str], command: list[str]) -> int:
        """Start a process in new namespaces that dies with this one; return its number."""
        with (self._scratch / "machines.log").open("ab") as log:
            holder = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *unshare, *command], stdin=subprocess.DEVNULL, stderr=log
            )
        self._holders.append(holder)
        return holder.pid

    def _ip(self, *commands: str) -> str:
        """Run commands of ``ip`` where the bridge is; return what they wrote."""
        said = [
            subprocess.run(
                ["nsenter", "-t", str(self._switch), "-n", "ip", *command.split()],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            for command in commands
        ]
        return "".join(said)


def _lines(commands: Iterable[str]) -> str:
    return "\n".join(commands)


def _namespace(process: int, kind: str) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/{kind}").readlink())
    except OSError:
        return ""


def _children(process: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _process(number: int) -> Process | None:
    try:
        command = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return Process(number, command, str(Path(f"/proc/{number}/fd/1").readlink())) if command else None
    except OSError:  # it has ended meanwhile
        return None
