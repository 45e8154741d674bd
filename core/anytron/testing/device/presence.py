"""The platform says what it is, and there is a device behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.errors import AnytronError
from anytron.platform import Availability, Probe, decisions_of, limits_of
from anytron.plugins import check_requirements
from anytron.testing.rules import Broken, rule

if TYPE_CHECKING:
    from anytron.testing.rules import Case
    from anytron.testing.subject import Subject


@rule(
    "probe-and-runtime",
    "device",
    "The probe of a usable device says so again and again, and one runtime per process stands for as many devices as "
    "the probe counted.",
)
def probe_and_runtime(subject: Subject, case: Case) -> None:
    """The probe is asked twice, the runtime fetched twice, and each device made current.

    A runtime made anew at each call loses its state; a device count that differs from the probe's lets runs start
    that have no device for a rank. `current_device()` must be the device that `set_device` chose.
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
    if here.type != runtime.device_type:
        raise Broken("The current device is of another type than the runtime.", f"{here}, {runtime.device_type}")
    count = runtime.device_count()
    if count < 1 or (subject.platform.accelerator and count != probes[0].devices):
        raise Broken("Probe and runtime count different devices.", f"{probes[0].devices} and {count}")
    for index in range(count):
        runtime.set_device(index)
        now = runtime.current_device()
        if now.index not in (None, index):
            raise Broken("set_device does not make the device the current one.", f"set {index}, current {now}")
    runtime.set_device(here.index or 0)


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
    try:
        decisions_of(platform)
        limits_of(platform)
        check_requirements(subject.hooks)
    except AnytronError as error:
        raise Broken(error.what, error.why) from error
    if type(platform)().name != platform.name:
        raise Broken("A second object of the platform's class has another name.")
