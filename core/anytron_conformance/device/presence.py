"""The platform says what it is, and there is a device behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.device.loading import check_requirements
from anytron.device.platform import Availability, Probe, decisions_of, limits_of
from anytron_conformance.ranks import Member, on_ranks
from anytron_conformance.rules import Broken, rule

if TYPE_CHECKING:
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject


@rule(
    "probe-and-runtime",
    "device",
    "The probe of a usable device says so again and again, and one runtime per process stands for as many devices as "
    "the probe counted.",
)
def probe_and_runtime(subject: Subject, case: Case) -> None:
    """The probe is asked twice, the runtime fetched twice, and the current device set again.

    A runtime made anew at each call loses its state; a device count that differs from the probe's lets runs start
    that have no device for a rank. A process uses one device: that ranks get their own is a rule of its own.
    """
    del case
    probes = [subject.platform.probe() for _ in range(2)]
    for probe in probes:
        if not isinstance(probe, Probe) or probe.availability is not Availability.USABLE:
            raise Broken("The probe of the device that this process uses does not say that it is usable.", f"{probe}")
    if probes[0] != probes[1]:
        raise Broken("The probe answers something else when it is asked again.", f"{probes[0]}, then {probes[1]}")
    if subject.platform.runtime() is not subject.runtime:
        raise Broken("runtime() makes a new object at each call.")
    runtime, here = subject.runtime, subject.runtime.current_device()
    if not isinstance(here, torch.device):
        raise Broken("current_device() answers with something else than a torch.device.", f"{here!r}")
    if here.type != runtime.device_type:
        raise Broken("The current device is of another type than the runtime.", f"{here}, {runtime.device_type}")
    count = runtime.device_count()
    if not isinstance(count, int):
        raise Broken("device_count() answers with something else than a number.", f"{count!r}")
    if count < 1 or (subject.platform.accelerator and count != probes[0].devices):
        raise Broken("Probe and runtime count different devices.", f"{probes[0].devices} and {count}")
    runtime.set_device(here.index or 0)
    if runtime.current_device() != here:
        raise Broken("Setting the current device changes it.", f"{here}, then {runtime.current_device()}")


@rule(
    "says-what-it-is",
    "device",
    "Name, decisions, limits and requirements keep their contracts, and what is required is installed.",
)
def says_what_it_is(subject: Subject, case: Case) -> None:
    """`decisions()`, `limits()` and the hook `requirements` are asked, and a second platform object is made.

    The constructor must work on any machine, again and again: the loader makes an object of every installed platform.
    """
    del case
    platform = subject.platform
    decisions_of(platform)
    limits_of(platform)
    check_requirements(subject.hooks)
    if type(platform)().name != platform.name:
        raise Broken("A second object of the platform's class has another name.")


@rule("ranks-own-devices", "device", "Each rank computes on the device that set_device gave it.", limit_s=360.0)
def ranks_own_devices(subject: Subject, case: Case) -> None:
    """Two ranks set the devices 0 and 1, and each looks where its tensors are.

    Ranks that share the first device in silence run out of its memory, or wait for each other for ever.
    """
    del case
    on_ranks(subject, 2, compare_device)


def compare_device(member: Member) -> None:
    """Compare the device of this rank's tensors with its number."""
    import torch

    device = torch.ones(1, device=member.subject.device).device
    if device.index not in (None, member.rank):
        raise Broken("A rank's tensors are on another rank's device.", f"rank {member.rank} has them on {device}")
