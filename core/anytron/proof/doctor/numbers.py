"""A few numbers, computed on the live device by the platform's own kernels, against float64 on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron.base.results import Result
from anytron.device.limits import Feature
from anytron.device.loading.neutral import NeutralDefaults
from anytron.proof.doctor.live import ProbeError
from anytron.run.preflight.limits import asked_by_model, declared_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.proof.doctor.live import Live
    from anytron.proof.doctor.subject import Subject


@dataclass(frozen=True)
class Numbers:
    """Some of them.

    Attributes:
        question: For :mod:`anytron.proof.doctor.worker`.
        kernel: Which computes them.
        needs: What the platform must have.
    """

    question: str
    kernel: str
    needs: tuple[Feature, ...] = ()

    @property
    def name(self) -> str:
        """That of the entry, without the topic."""
        return self.question.replace(" ", "-")


PROBES = (
    Numbers("attention thd", "attention_kernel", (Feature.THD,)),
    Numbers("attention bshd", "attention_kernel", (Feature.BSHD,)),
    Numbers("attention thd window", "attention_kernel", (Feature.THD, Feature.SLIDING_WINDOW)),
    Numbers("attention bshd window", "attention_kernel", (Feature.BSHD, Feature.SLIDING_WINDOW)),
    Numbers("log-probs", "log_prob_kernel"),
)
"""Those of layers with a sliding window for models that have such layers."""


def examine(subject: Subject, live: Live) -> Iterator[Result]:
    """Make each probe; one that fails, hangs or ends its process hides no other."""
    platform = subject.opened.platform
    limits = declared_limits(platform, subject.opened.hooks)
    asked = {} if subject.run is None else asked_by_model(subject.run)
    for probe in PROBES:
        name, attends = f"numbers.{probe.name}", probe.kernel == "attention_kernel"
        if Feature.SLIDING_WINDOW in probe.needs and Feature.SLIDING_WINDOW not in asked:
            continue
        if attends and not platform.portable_modules:
            why = f"platform '{platform.name}' builds models of a vendor's modules, which call kernels of their own"
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
    off = f"{difference:.2g} of the largest value off (tolerance {tolerance:g})"
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
    return f"do not train with it: update or leave out what supplies it ('{supplier}'), and report it to its authors"
