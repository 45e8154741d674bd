"""Which kernels a training rank takes from which plugin, and why not a faster one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.results import Result
from anytron.device.loading.neutral import NeutralDefaults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.proof.doctor.live import Live
    from anytron.proof.doctor.subject import Subject

_MATTERS = ("attention_kernel", "log_prob_kernel")
"""Kernels whose plain torch implementation costs an accelerator much."""


def examine(subject: Subject, live: Live) -> Iterator[Result]:
    """Ask for every kernel in a process with the device, for the model's own attention where it is known."""
    platform, answer = subject.opened.platform, live.ask("kernels")
    if not platform.portable_modules:
        detail = (
            "models are built of a vendor's modules, which bring kernels of their own (platform.modules says whose)"
        )
        yield Result("kernels.modules", "passed", f"{detail}; those below are asked for by the layers that are not")
    for kernel, row in answer["kernels"].items():
        name = f"kernels.{kernel.removeprefix('fused_kernel ')}"
        neutral = row["supplier"] == NeutralDefaults.name
        what = row["description"] or ("plain torch" if neutral else row["function"])
        slow = platform.accelerator and platform.portable_modules and kernel in _MATTERS
        if neutral and slow:
            detail = f"plain torch: platform '{platform.name}' supplies none"
            yield Result(
                name, "warning", detail, f"implement the hook {kernel} in '{platform.name}', or install its library"
            )
        elif slow and what.startswith("neutral "):
            fix = "install what is missing, or set what it asks for; it works without"
            yield Result(name, "warning", f"from '{row['supplier']}': {what}", fix)
        else:
            yield Result(name, "passed", f"from '{row['supplier']}': {what}")
    for kernel, error in answer["errors"].items():
        name = f"kernels.{kernel.removeprefix('fused_kernel ')}"
        yield Result(
            name,
            "failed",
            f"the plugins cannot supply it: {error}",
            "leave the plugin out, or report it to its authors",
        )
