"""Estimate the device memory of a run, part by part, and compare it with what a device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import AnytronError
from anytron.base.results import Result, of_error
from anytron.proof.doctor.live import ProbeError
from anytron.proof.planning.plan import make_plan
from anytron.workers.engines.memory import DeviceMemory, readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.proof.doctor.live import Live
    from anytron.proof.doctor.subject import Subject
    from anytron.proof.planning.plan import DevicePlan


def examine(subject: Subject, live: Live) -> Iterator[Result]:
    """Give the parts of each process, and the verdict on each kind of device."""
    if subject.run is None:
        yield Result(
            "memory.total", "skipped", "no CONFIG was given" if subject.misread is None else "CONFIG is not valid"
        )
        return
    device, unknown = device_memory(subject, live)
    try:
        plan = make_plan(subject.run, device)
    except AnytronError as error:
        yield of_error("memory.training", error, "warning")
        return
    for engine in plan.silent:
        yield Result("memory.rollout", "skipped", f"the engine {engine} gives no estimate")
    for one in plan.devices:
        for share in one.shares:
            for part in share.parts:
                yield Result(f"memory.{share.slug}.{part.name}", "passed", str(part))
        yield _verdict(one, unknown)


def device_memory(subject: Subject, live: Live) -> tuple[DeviceMemory, str]:
    """Ask what the smallest device has; and why that is not known, if it is not."""
    if subject.session is None:
        return DeviceMemory(None, accelerator=True), "no platform is active"
    accelerator = subject.session.platform.accelerator
    try:
        seen = live.ask("devices")
    except ProbeError as error:
        return DeviceMemory(None, accelerator), error.what
    if not seen["devices"]:
        return DeviceMemory(None, accelerator), "no device is seen"
    return DeviceMemory(min(device["total"] for device in seen["devices"]), accelerator), ""


def _verdict(device: DevicePlan, unknown: str) -> Result:
    name, needs = f"memory.{device.name}", f"{device.crowd} need about {readable(device.needed)} at their fullest"
    if device.total is None:
        return Result(name, "skipped", f"{needs}; what a device has is not known: {unknown}")
    detail = f"{needs}; {device.place} has {readable(device.total)}"
    fix = "anytron plan CONFIG says which settings make it smaller, and by how much"
    if not device.fits:
        return Result(name, "failed", f"{detail}: it does not fit", fix)
    if device.tight:
        return Result(name, "warning", f"{detail}: less than a tenth is left", fix)
    return Result(name, "passed", detail)
