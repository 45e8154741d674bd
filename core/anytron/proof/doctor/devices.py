"""Topics that need the device: devices, executors, kernels, their numbers compared with float64, and memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron.base.components import EXECUTORS, component_names
from anytron.base.errors import AnytronError
from anytron.base.results import Result, of_error
from anytron.device.loading.neutral import NeutralDefaults
from anytron.device.platform import Feature
from anytron.kernels.contract import NEVER_INVARIANT, WITHOUT_INVARIANCE
from anytron.proof.doctor.live import ProbeError
from anytron.proof.planning import make_plan
from anytron.run.preflight.limits import asked_by_model, declared_limits
from anytron.workers.engines.estimates import DeviceMemory, readable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from anytron.base.results import Status
    from anytron.proof.doctor.live import Live
    from anytron.proof.doctor.subject import Subject
    from anytron.proof.planning import DevicePlan


def examine_devices(subject: Subject, live: Live) -> Iterator[Result]:
    """Compare the devices that the machine has with those that a process sees."""
    platform, probe = subject.opened.platform, subject.opened.probe
    if platform.visible_devices_variable is not None:
        value = os.environ.get(platform.visible_devices_variable)
        shown = "not set: all devices are visible" if value is None else f"'{value}'"
        status: Status = "warning" if value == "" else "passed"
        fix = f"unset {platform.visible_devices_variable}, or list devices in it" if value == "" else ""
        yield Result(f"devices.{platform.visible_devices_variable}", status, shown, fix)
    seen = live.ask("devices")
    for index, device in enumerate(seen["devices"]):
        size = "memory unknown to torch" if device["total"] is None else readable(device["total"])
        yield Result(f"devices.{index}", "passed", f"{device['name']}, {size} ({seen['type']})")
    count = seen["count"]
    detail = f"{count} of {probe.devices} that the platform's probe found ({probe.reason})"
    if count == 0:
        fix = "let the process see a device: check the variables that the entries environment.* list"
        yield Result("devices.seen", "failed", detail, fix)
    elif count != probe.devices:
        fix = "check the variables that the entries environment.* list: the driver's library and torch disagree"
        yield Result("devices.seen", "warning", detail, fix)
    else:
        yield Result("devices.seen", "passed", detail)


def examine_executors(subject: Subject, live: Live) -> Iterator[Result]:
    """Let each installed executor examine what it depends on, in the separate process in which probes run."""
    for name in component_names(EXECUTORS):
        used = "this run uses it" if name == subject.executor else "this run does not use it"
        try:
            answer = live.ask(f"executor {name}")
        except ProbeError as error:
            yield of_error(f"executors.{name}", error, "failed" if name == subject.executor else "warning")
            continue
        yield Result(f"executors.{name}", "passed", used)
        for row in answer["entries"]:
            yield Result(**row)


_MATTERS = ("attention_kernel", "log_prob_kernel")
"""Kernels whose plain torch implementation costs much time or memory on an accelerator."""


def examine_kernels(subject: Subject, live: Live) -> Iterator[Result]:
    """Ask the plugins for every kernel, in a process that uses the device; with the model's sizes if they are known."""
    platform, answer = subject.opened.platform, live.ask("kernels")
    if not platform.portable_modules:
        detail = "models are built from a vendor's modules with their own kernels (platform.modules names the vendor)"
        yield Result("kernels.modules", "passed", f"{detail}; the kernels below serve the other layers")
    for kernel, row in answer["kernels"].items():
        name = f"kernels.{kernel.removeprefix('fused_kernel ')}"
        neutral = row["supplier"] == NeutralDefaults.name
        what = row["description"] or ("plain torch" if neutral else row["function"])
        slow = platform.accelerator and platform.portable_modules and kernel in _MATTERS
        if neutral and slow:
            detail = f"plain torch: platform '{platform.name}' supplies no such kernel"
            yield Result(
                name,
                "warning",
                detail,
                f"implement the hook {kernel} in '{platform.name}', or install its kernel library",
            )
        elif slow and what.startswith("neutral "):
            fix = "install or set what this entry says is missing; without it a run works, but more slowly"
            yield Result(name, "warning", f"from '{row['supplier']}': {what}", fix)
        else:
            yield Result(name, "passed", f"from '{row['supplier']}': {what}")
    if subject.run is not None and subject.run.engine.on_policy == "bitwise":
        yield _company_invariance(subject, answer["kernels"])
    for kernel, error in answer["errors"].items():
        name = f"kernels.{kernel.removeprefix('fused_kernel ')}"
        yield Result(
            name,
            "failed",
            f"the plugins cannot supply it: {error}",
            "disable the plugin (ANYTRON_DISABLE_PLUGINS=NAME), or report the error to its authors",
        )


def _company_invariance(subject: Subject, kernels: Mapping[str, Any]) -> Result:
    """Say which kernels are company-invariant; one that does not say so is an error of its own."""
    name, platform = "kernels.company-invariance", subject.opened.platform
    reason = declared_limits(platform, subject.opened.hooks).get(Feature.COMPANY_INVARIANCE)
    if reason is not None:
        fix = "set engine.on_policy=close, or use another platform"
        return Result(name, "failed", f"the platform {platform.name} has none: {reason}", fix)
    without = {f"fused_kernel {one.value}" for one in NEVER_INVARIANT}
    own = [one for one, row in kernels.items() if row["supplier"] != NeutralDefaults.name and one not in without]
    detail = f"of plugins: {', '.join(own) or 'none'}; plain torch: the others"
    lacking = ", ".join(one.value for one in WITHOUT_INVARIANCE)
    return Result(name, "passed", f"{detail}, but {lacking}, which depend on what else is in the call")


def examine_operators(subject: Subject, live: Live) -> Iterator[Result]:
    """Name the operators of a training step for which no kernel is registered for the device."""
    del subject
    answer = live.ask("operators")
    if not answer["host"]:
        detail = f"the device has kernels for all {answer['calls']} operator calls of a small training step"
        yield Result("operators.kernels", "passed", detail)
        return
    detail = (
        "the device lacks kernels for operators of a small training step, which are computed elsewhere, usually on the "
        f"host; {answer['named']}"
    )
    fix = (
        "install a release of the device's torch package that has kernels for these operators: copies to the host and "
        "back are slow"
    )
    yield Result("operators.kernels", "warning", detail, fix)


@dataclass(frozen=True)
class Numbers:
    """Numbers that a kernel computes on the device, to be compared with float64.

    Attributes:
        question: Argument of :meth:`~anytron.proof.doctor.live.Live.ask`: name of the probe, and its own argument.
        kernel: Kernel that computes the numbers.
        needs: Features that the platform must have.
    """

    question: str
    kernel: str
    needs: tuple[Feature, ...] = ()

    @property
    def name(self) -> str:
        """Name of the probe's result, without the topic ``numbers``."""
        return self.question.replace(" ", "-")


PROBES = (
    Numbers("attention thd", "attention_kernel", (Feature.THD,)),
    Numbers("attention bshd", "attention_kernel", (Feature.BSHD,)),
    Numbers("attention thd window", "attention_kernel", (Feature.THD, Feature.SLIDING_WINDOW)),
    Numbers("attention bshd window", "attention_kernel", (Feature.BSHD, Feature.SLIDING_WINDOW)),
    Numbers("log-probs", "log_prob_kernel"),
)
"""All probes of numbers; those with ``window`` are run for models that have layers with a sliding window."""


def examine_numbers(subject: Subject, live: Live) -> Iterator[Result]:
    """Run each probe of :data:`PROBES`; if one fails, hangs or ends its process, the others are run all the same."""
    platform = subject.opened.platform
    limits = declared_limits(platform, subject.opened.hooks)
    asked = {} if subject.run is None else asked_by_model(subject.run)
    for probe in PROBES:
        name, attends = f"numbers.{probe.name}", probe.kernel == "attention_kernel"
        if Feature.SLIDING_WINDOW in probe.needs and Feature.SLIDING_WINDOW not in asked:
            continue
        if attends and not platform.portable_modules:
            why = f"platform '{platform.name}' builds models from a vendor's modules, which call their own kernels"
            yield Result(name, "skipped", why, "anytron verify compares the whole model")
            continue
        sinks = (Feature.ATTENTION_SINKS,) if attends and Feature.ATTENTION_SINKS in asked else ()
        declined = next((one for one in (*probe.needs, *sinks) if one in limits), None)
        if declined is not None:
            yield Result(name, "skipped", f"platform '{platform.name}' has no {declined.value}: {limits[declined]}")
            continue
        yield _judged(name, probe, platform.name, live)


def _judged(name: str, probe: Numbers, platform: str, live: Live) -> Result:
    kernel = probe.kernel
    try:
        answer = live.ask(probe.question)
    except ProbeError as error:
        known = live.suppliers()
        if not known:  # the topic kernels has failed, and said why
            return Result(name, "skipped", f"no kernel could be called: {error.headline}")
        supplier = known.get(kernel, platform)
        return Result(
            name,
            "failed",
            f"the {kernel} of '{supplier}' gave no numbers: {error.headline} {error.why}".rstrip(),
            _fix(supplier),
        )
    difference, tolerance, supplier = answer["difference"], answer["tolerance"], answer["supplier"]
    off = f"off by {difference:.2g} of the largest value (tolerance {tolerance:g})"
    detail = f"{answer['detail']}: {off}, {kernel} of '{supplier}'"
    if answer["mask_from"]:
        detail += f", mask of '{answer['mask_from']}'"
    # Not "> tolerance": NaN is wrong too.
    if answer["wrong"] or not difference <= tolerance:
        return Result(name, "failed", detail, _fix(supplier))
    return Result(name, "passed", detail)


def _fix(supplier: str) -> str:
    if supplier == NeutralDefaults.name:
        return (
            "torch itself computes wrongly on this device: install a torch that was built for it, or try another device"
        )
    return f"do not train with this kernel: update or disable its supplier ('{supplier}'), and report it to its authors"


def examine_memory(subject: Subject, live: Live) -> Iterator[Result]:
    """Yield the estimated memory of each process, part by part, and whether the processes fit on their devices."""
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
    """Return the memory of the smallest device, and why it is not known; the reason is empty if it is known."""
    if subject.session is None:
        return DeviceMemory(None, accelerator=True), "no platform is active"
    accelerator = subject.session.platform.accelerator
    try:
        seen = live.ask("devices")
    except ProbeError as error:
        return DeviceMemory(None, accelerator), error.what
    if not seen["devices"]:
        return DeviceMemory(None, accelerator), "no device is seen"
    totals = [device["total"] for device in seen["devices"]]
    if None in totals:
        return DeviceMemory(None, accelerator), "torch cannot tell it"
    return DeviceMemory(min(totals), accelerator), ""


def _verdict(device: DevicePlan, unknown: str) -> Result:
    name, needs = f"memory.{device.name}", f"{device.crowd} need about {readable(device.needed)} at their peak"
    if device.total is None:
        return Result(name, "skipped", f"{needs}; the memory of a device is not known: {unknown}")
    detail = f"{needs}; {device.place} has {readable(device.total)}"
    fix = "run `anytron plan CONFIG`: it says which settings need less memory, and how much less"
    if not device.fits:
        return Result(name, "failed", f"{detail}: it is too small", fix)
    if device.tight:
        return Result(name, "warning", f"{detail}: less than a tenth is left", fix)
    return Result(name, "passed", detail)
