"""The devices: what the driver's probe found, what a process sees, and what the environment lets it see."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from anytron.base.results import Result
from anytron.workers.engines.memory import readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.results import Status
    from anytron.proof.doctor.live import Live
    from anytron.proof.doctor.subject import Subject


def examine(subject: Subject, live: Live) -> Iterator[Result]:
    """Compare what is there with what is seen."""
    platform, probe = subject.opened.platform, subject.opened.probe
    if platform.visible_devices_variable is not None:
        value = os.environ.get(platform.visible_devices_variable)
        shown = "not set: all devices are visible" if value is None else f"'{value}'"
        status: Status = "warning" if value == "" else "passed"
        fix = f"unset {platform.visible_devices_variable}, or name devices" if value == "" else ""
        yield Result(f"devices.{platform.visible_devices_variable}", status, shown, fix)
    seen = live.ask("devices")
    for index, device in enumerate(seen["devices"]):
        yield Result(f"devices.{index}", "passed", f"{device['name']}, {readable(device['total'])} ({seen['type']})")
    count = seen["count"]
    detail = f"{count} of {probe.devices} that the platform's probe found ({probe.reason})"
    if count == 0:
        yield Result("devices.seen", "failed", detail, "let the process see a device: compare the variables above")
    elif count != probe.devices:
        yield Result(
            "devices.seen", "warning", detail, "the driver's library and torch disagree: compare the variables above"
        )
    else:
        yield Result("devices.seen", "passed", detail)
