"""The devices: what the driver's probe found, what a process sees, and what the environment lets it see."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from anytron.base.entries import Entry
from anytron.workers.engines.memory import readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.entries import Status
    from anytron.proof.doctor.live import Live
    from anytron.proof.doctor.subject import Subject


def examine(subject: Subject, live: Live) -> Iterator[Entry]:
    """Compare what is there with what is seen."""
    if subject.session is None:
        yield Entry("devices.seen", "skip", "no platform is active")
        return
    platform, probe = subject.session.platform, subject.session.probe
    if platform.visible_devices_variable is not None:
        value = os.environ.get(platform.visible_devices_variable)
        shown = "not set: all devices are visible" if value is None else f"'{value}'"
        status: Status = "warn" if value == "" else "ok"
        fix = f"unset {platform.visible_devices_variable}, or name devices" if value == "" else ""
        yield Entry(f"devices.{platform.visible_devices_variable}", status, shown, fix)
    seen = live.ask("devices")
    for index, device in enumerate(seen["devices"]):
        yield Entry(f"devices.{index}", "ok", f"{device['name']}, {readable(device['total'])} ({seen['type']})")
    count = seen["count"]
    detail = f"{count} of {probe.devices} that the platform's probe found ({probe.reason})"
    if count == 0:
        yield Entry("devices.seen", "fail", detail, "let the process see a device: compare the variables above")
    elif count != probe.devices:
        yield Entry(
            "devices.seen", "warn", detail, "the driver's library and torch disagree: compare the variables above"
        )
    else:
        yield Entry("devices.seen", "ok", detail)
