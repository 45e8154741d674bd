"""A few numbers, computed on the live device by the platform's own kernels, against float64 on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.doctor.live import ProbeError
from anytron.entries import Entry
from anytron.plugins.neutral import NeutralDefaults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.doctor.live import Live
    from anytron.doctor.subject import Subject

PROBES = {"attention-thd": "attention_kernel", "attention-bshd": "attention_kernel", "log-probs": "log_prob_kernel"}
"""Each with the kernel that it calls."""


def examine(subject: Subject, live: Live) -> Iterator[Entry]:
    """Make each probe; one that fails, hangs or ends its process hides no other."""
    if subject.session is None:
        yield Entry("numbers.all", "skip", "no platform is active")
        return
    platform = subject.session.platform
    for probe, kernel in PROBES.items():
        name = f"numbers.{probe}"
        if kernel == "attention_kernel" and not platform.portable_modules:
            why = f"platform '{platform.name}' builds models of a vendor's modules, which call kernels of their own"
            yield Entry(name, "skip", why, "anytron verify compares the whole model")
            continue
        yield _judged(name, probe, kernel, platform.name, live)


def _judged(name: str, probe: str, kernel: str, platform: str, live: Live) -> Entry:
    try:
        answer = live.ask(probe)
    except ProbeError as error:
        known = live.suppliers()
        if not known:  # the topic kernels has failed, and said why
            return Entry(name, "skip", f"no kernel could be called: {error.what}")
        supplier = known.get(kernel, platform)
        return Entry(
            name,
            "fail",
            f"the {kernel} of '{supplier}' gave no numbers: {error.what} {error.why}".rstrip(),
            _fix(supplier),
        )
    difference, tolerance, supplier = answer["difference"], answer["tolerance"], answer["supplier"]
    off = f"{difference:.2g} of the largest value off (tolerance {tolerance:g})"
    detail = f"{answer['detail']}: {off}, {kernel} of '{supplier}'"
    if answer["mask_from"]:
        detail += f", mask of '{answer['mask_from']}'"
    # Not "> tolerance": NaN is wrong too.
    if answer["wrong"] or not difference <= tolerance:
        return Entry(name, "fail", detail, _fix(supplier))
    return Entry(name, "ok", detail)


def _fix(supplier: str) -> str:
    if supplier == NeutralDefaults.name:
        return (
            "torch itself computes wrongly on this device: install a torch that was built for it, or try another device"
        )
    return f"do not train with it: update or leave out what supplies it ('{supplier}'), and report it to its authors"
