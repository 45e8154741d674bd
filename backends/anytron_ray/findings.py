"""Compare what machines have said with what a run needs: all that is wrong goes into one error, before a start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.base.version import installable
from anytron.workers.engines.estimates import readable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anytron_ray.introduction import Introduction

CLOCK_S = 5.0
"""Seconds by which the clock of a machine may differ from the driver's."""
SCARCE = 1 << 30
"""Free bytes, of memory or of a shared file system, below which a run probably fails."""
FOLLOWING = 16
"""Machines that each machine connects to before a start, besides rank 0's and the driver's: the next ones in a ring.

So up to 17 machines connect all to all, in both directions; for more, the number of connections grows with that of the
machines, not with its square.
"""


@dataclass(frozen=True)
class Machine:
    """A machine, and what it has answered.

    Attributes:
        address: Its address in the cluster.
        interface: Name of the network interface that has this address; None if no interface has it.
        said: The machine's answer; None if it did not answer in time.
        ahead_s: Least number of seconds by which its clock is ahead of the driver's; negative if it is behind, 0.0 if
            the clocks may be equal (:func:`ahead`).
    """

    address: str
    interface: str | None
    said: Introduction | None
    ahead_s: float = 0.0

    @property
    def name(self) -> str:
        """Host name and address."""
        return self.address if self.said is None else f"{self.said.name} ({self.address})"


@dataclass(frozen=True)
class Obstacle:
    """A connection that could not be made.

    Attributes:
        source: Name of the machine that tried.
        target: Name of the machine that listened.
        port: Port at which it listened.
        why: What happened.
    """

    source: str
    target: str
    port: int
    why: str


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a machine.

    Attributes:
        machine: Name of the machine.
        what: What is wrong, as the rest of a sentence that begins with the machine.
        fix: Remedy, worded for all machines that have the same fault.
        fatal: Whether the run cannot start; False = it can, but may fail later.
    """

    machine: str
    what: str
    fix: str
    fatal: bool = True


def partners(machine: int, machines: int) -> list[int]:
    """Choose the machines to which a machine connects before a start: the next ones in a ring, and rank 0's.

    Args:
        machine: Number of the machine; that of rank 0 is 0.
        machines: Number of machines with ranks.
    """
    following = {(machine + step) % machines for step in range(1, min(FOLLOWING, machines - 1) + 1)}
    return sorted((following | {0}) - {machine})


def ahead(clock: float, asked: float, answered: float) -> float:
    """Compare a machine's clock with the driver's.

    Args:
        clock: What the machine's clock showed, in seconds, at some time between question and answer.
        asked: What the driver's clock showed before it asked.
        answered: What the driver's clock showed when the answer had arrived.

    Returns:
        The least number of seconds by which the machine's clock can be ahead; negative if it is behind, 0.0 if both
            clocks may be equal.
    """
    return max(clock - answered, 0.0) + min(clock - asked, 0.0)


def compared(
    driver: Machine, machines: Sequence[Machine], paths: Mapping[str, str], obstacles: Sequence[Obstacle]
) -> list[Finding]:
    """Find what is wrong with the machines of a run.

    Args:
        driver: The driver's machine.
        machines: Machines of the ranks, which may include the driver's.
        paths: The paths that machines must share or have, by key.
        obstacles: Connections that could not be made.
    """
    found = [finding for machine in machines for finding in _of_machine(driver, machine, paths)]
    found += [
        Finding(
            one.source,
            f"cannot connect to {one.target} at port {one.port}, where that machine listens: {one.why}; a firewall "
            "drops or rejects new connections, or there is no route",
            "let the firewalls accept connections between these machines at every port, or start Ray with addresses of "
            "a network where they do: ray start --node-ip-address=ADDRESS",
        )
        for one in obstacles
    ]
    return found


def require(findings: Sequence[Finding]) -> None:
    """Raise one error for all machines with which a run cannot work.

    Raises:
        ConfigError: A finding is fatal; the error lists each machine and what is wrong with it.
    """
    fatal = [finding for finding in findings if finding.fatal]
    if not fatal:
        return
    names = list(dict.fromkeys(finding.machine for finding in fatal))
    raise ConfigError(
        f"The run cannot start on {len(names)} of its machines.",
        where=", ".join(names),
        why="\n".join(f"{finding.machine} {finding.what}" for finding in fatal),
        fix="\n".join(dict.fromkeys(finding.fix for finding in fatal)),
    )


def described(machine: Machine) -> str:
    """Describe a machine in one line, for ``anytron doctor``."""
    said = machine.said
    if said is None:
        return machine.name
    versions = ", ".join(f"{name} {version}" for name, version in said.versions.items())
    disks = "".join(f", {readable(free)} of disk free at {key}" for key, free in said.disks.items())
    interface = machine.interface or "no interface"
    clock = "the driver's time" if not machine.ahead_s else f"{_seconds(machine.ahead_s)} the driver's time"
    return f"{said.name}: {versions}; {interface}; {clock}; {readable(said.memory)} of memory free{disks}"


def _of_machine(driver: Machine, machine: Machine, paths: Mapping[str, str]) -> Iterator[Finding]:
    name, said, expected = machine.name, machine.said, driver.said
    assert expected is not None, "the driver has answered itself"
    if said is None:
        yield Finding(
            name,
            "did not answer in time: a file system that the run reads or writes may hang there",
            "check the mounts and the load of each machine that did not answer",
        )
        return
    for what, version in said.versions.items():
        if _public(version) != _public(expected.versions[what]):
            fixes = {
                "anytron": f"on each machine: pip install {installable(expected.versions[what])}",
                "Python": f"start Ray on each machine with Python {expected.versions[what]}",
            }
            yield Finding(
                name,
                f"has {what} {version}, but the driver ({driver.name}) has {expected.versions[what]}",
                fixes.get(what, f"on each machine: pip install {what}=={_public(expected.versions[what])}"),
            )
    for key in said.unseen:
        yield Finding(
            name,
            f"does not see the file that the driver ({driver.name}) has just written into {key}={paths[key]}",
            f"set {key} to a directory of a file system that all machines have mounted at the same path",
        )
    for key in said.missing:
        yield Finding(
            name,
            f"has no {key}={paths[key]}",
            f"copy {key} to the same path on every machine, or set it to a path that they share",
        )
    if said.deaf:
        yield Finding(
            name,
            f"cannot listen at its own address: {said.deaf}",
            "start Ray on this machine with one of its addresses: ray start --node-ip-address=ADDRESS",
        )
    if abs(machine.ahead_s) > CLOCK_S:
        yield Finding(
            name,
            f"has a clock that is {_seconds(machine.ahead_s)} the driver's",
            "set the clocks of all machines by NTP: timedatectl set-ntp true",
            fatal=False,
        )
    if said.memory < SCARCE:
        yield Finding(
            name,
            f"has {readable(said.memory)} of memory free",
            "end what takes memory there (`ps aux --sort=-rss`)",
            fatal=False,
        )
    for key, free in said.disks.items():
        if free < SCARCE:
            yield Finding(
                name,
                f"has {readable(free)} of disk free at {key}={paths[key]}",
                f"make room there, or set {key} to another directory",
                fatal=False,
            )


def _public(version: str) -> str:
    """A version without the part that says how it was built: the driver may have torch for CPUs alone."""
    return version.partition("+")[0]


def _seconds(ahead_s: float) -> str:
    return f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"
