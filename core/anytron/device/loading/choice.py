"""Choose the one active platform: explicit configuration > ``ANYTRON_PLATFORM`` > probe.

A fallback is never silent. The CPU (a platform with ``accelerator = False``) is chosen unasked only if every installed
accelerator is *absent*; one that is broken is an error, and two usable ones are an error that asks for a choice. If the
only usable accelerator belongs to a platform with ``chosen_by_name_only``, no installed platform covers the device:
that is an error too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from anytron.base.errors import PlatformError, did_you_mean
from anytron.device.loading.hiding import autoloaded_packages, own_packages_shown
from anytron.device.loading.report import PluginReport, State
from anytron.device.platform import Availability, Platform, Probe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.device.hooks.registry import Member
    from anytron.device.loading.discovery import Found

VARIABLE = "ANYTRON_PLATFORM"
OFFICIAL_PLATFORMS = {"ascend": "pip install 'anytron[ascend]'", "cuda": "pip install 'anytron[cuda]'"}
"""How to install the platforms of this project that are distributions of their own."""


@dataclass(frozen=True)
class Asked:
    """The platform that the user named, and the setting that named it."""

    name: str
    source: str


@dataclass(frozen=True)
class Choice:
    """The active platform, its hooks, the answer of its probe, and why it was chosen."""

    member: Member
    platform: Platform
    probe: Probe
    reason: str


def asked_platform(configured: str | None) -> Asked | None:
    """Return the platform that the user asked for; None if the probes are to choose.

    Args:
        configured: ``platform.name``, which takes precedence over ``ANYTRON_PLATFORM``; None = not set.
    """
    if configured is not None:
        return Asked(configured, "platform.name")
    variable = os.environ.get(VARIABLE)
    return Asked(variable, VARIABLE) if variable else None


def probe_platforms(found: Sequence[Found], only: str | None = None, named: str | None = None) -> dict[str, Probe]:
    """Probe the loaded platforms, or only the one named ``only``; return the results by platform name.

    Platforms with ``chosen_by_name_only`` are probed if they are named, or if the user named no platform and no other
    accelerator is there. If a probe raises, the device counts as broken.

    Args:
        found: All installed plugins.
        only: Name of the one platform to probe; None = all of them.
        named: Name of the platform that the user asked for, if other platforms are probed too; None = no platform was
            asked for, or ``only`` names it.
    """
    platforms = [one.platform for one in found if one.platform is not None]
    covered = frozenset(name for one in platforms if not one.chosen_by_name_only for name in one.device_packages)
    for one in platforms:
        if one.chosen_by_name_only:
            one.named, one.covered_packages = one.name in (only, named), covered
    platforms = [one for one in platforms if only in (None, one.name)]
    probes = {one.name: _probe(one) for one in platforms if one.named or not one.chosen_by_name_only}
    if only is None and named is None and not any(_is_there(one, probes.get(one.name)) for one in platforms):
        probes |= {one.name: _probe(one) for one in platforms if one.name not in probes}
    return probes


def _is_there(platform: Platform, probe: Probe | None) -> bool:
    return platform.accelerator and probe is not None and probe.availability is not Availability.ABSENT


def _probe(platform: Platform) -> Probe:
    try:
        with own_packages_shown(platform):  # an earlier session of another platform has hidden them
            probe: object = platform.probe()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported as a broken platform
        reason = f"its probe raised {type(error).__name__}: {error}"
        return Probe(Availability.BROKEN, reason, f"report this to the authors of platform '{platform.name}'")
    if not isinstance(probe, Probe):
        reason = f"its probe returned {probe!r}, which is not a Probe"
        return Probe(Availability.BROKEN, reason, f"report this to the authors of platform '{platform.name}'")
    return probe


def choose_platform(found: Sequence[Found], probes: Mapping[str, Probe], asked: Asked | None) -> Choice:
    """Choose the active platform: the one that the user asked for, else the only one that the probes leave.

    Args:
        found: All installed plugins.
        probes: Results of the probes, of the platform asked for or of all platforms.
        asked: The platform that the user named; None if they named none.

    Raises:
        PlatformError: The platform asked for cannot be used, or the probes leave no single choice.
    """
    platforms = [candidate for candidate in found if candidate.report.kind == "platform"]
    if asked is not None:
        return _choose_asked(platforms, probes, asked)
    return _choose_probed(platforms, probes)


def _choose_asked(platforms: Sequence[Found], probes: Mapping[str, Probe], asked: Asked) -> Choice:
    where = f"{asked.source}={asked.name}"
    candidate = next((one for one in platforms if one.report.name == asked.name), None)
    if candidate is None:
        _refuse_unknown(platforms, asked, where)
    if candidate.platform is None or candidate.member is None:
        raise PlatformError(
            f"Platform '{asked.name}' is {candidate.report.state.value}.",
            where=where,
            why=candidate.report.reason,
            fix=candidate.report.remedy,
        )
    probe = probes[asked.name]
    if probe.availability is not Availability.USABLE:
        found = "not on this machine" if probe.availability is Availability.ABSENT else "not usable"
        raise PlatformError(
            f"Platform '{asked.name}' cannot be used: its device is {found}.",
            where=where,
            why=probe.reason,
            fix=probe.remedy,
        )
    return Choice(candidate.member, candidate.platform, probe, f"asked for by {asked.source}; {probe.reason}")


def _refuse_unknown(platforms: Sequence[Found], asked: Asked, where: str) -> NoReturn:
    installed = [one.report.name for one in platforms]
    near = did_you_mean(asked.name, [*installed, *OFFICIAL_PLATFORMS])
    others = "install the distribution that offers it (pip install ./anytron-NAME, if anytron new-platform wrote it)"
    fix = OFFICIAL_PLATFORMS.get(asked.name) or (f"{near} Otherwise {others}" if near else others)
    package = next((one for one in autoloaded_packages() if asked.name in one.split("_")), None)
    if package is not None and asked.name not in OFFICIAL_PLATFORMS:
        ways = _ways_on(next((one for one in platforms if _is_by_name_only(one)), None), asked.name)
        fix = f"The installed package {package} adds a device to torch. {ways}. {near}".rstrip()
    raise PlatformError(
        f"Platform '{asked.name}' is not installed.",
        where=where,
        why=f"no installed distribution offers it; installed platforms: {', '.join(installed) or 'none'}",
        fix=fix,
    )


def _choose_probed(platforms: Sequence[Found], probes: Mapping[str, Probe]) -> Choice:
    usable: list[Choice] = []
    by_name_only: list[Found] = []
    processors: list[Choice] = []
    absent: list[str] = []
    broken: list[tuple[str, str, str]] = []
    for candidate in platforms:
        name = candidate.report.name
        if candidate.platform is None or candidate.member is None:
            if candidate.report.state is not State.BLOCKED:
                broken.append((name, candidate.report.reason, candidate.report.remedy))
            continue
        probe = probes.get(name)
        if probe is None:  # another accelerator is there
            continue
        if probe.availability is Availability.BROKEN:
            broken.append((name, probe.reason, probe.remedy))
        elif probe.availability is Availability.ABSENT:
            if probe.remedy or not candidate.platform.chosen_by_name_only:  # without a remedy there is nothing to say
                absent.append(f"{name}: {probe.reason}")
        elif candidate.platform.chosen_by_name_only:
            by_name_only.append(candidate)
        else:
            group = usable if candidate.platform.accelerator else processors
            group.append(Choice(candidate.member, candidate.platform, probe, probe.reason))
    if broken:
        remedies = [remedy for _, _, remedy in broken if remedy]
        if not any(VARIABLE in remedy for remedy in remedies):
            remedies.append(_name_one("cpu"))
        raise PlatformError(
            "An installed platform is broken, and no other platform is chosen in its place.",
            where=", ".join(name for name, _, _ in broken),
            why="; ".join(f"{name}: {reason}" for name, reason, _ in broken),
            fix="; ".join(remedies),
        )
    if by_name_only and not usable:
        _refuse_uncovered(by_name_only[0], probes, platforms)
    return _single(usable, processors, absent)


def _is_by_name_only(candidate: Found) -> bool:
    return candidate.platform is not None and candidate.platform.chosen_by_name_only


def _ways_on(by_name_only: Found | None, name: str) -> str:
    """Say how a device can be used that no installed platform covers; no full stop."""
    ways = [
        f"Install the device's platform, if there is one ({', '.join(OFFICIAL_PLATFORMS.values())})",
        f"write a platform: anytron new-platform {name}",
    ]
    if by_name_only is not None:
        one = by_name_only.report.name
        ways.append(f"use the device without its platform: platform.name={one}, or {VARIABLE}={one}")
    return "; or ".join(ways)


def _refuse_uncovered(found: Found, probes: Mapping[str, Probe], platforms: Sequence[Found]) -> NoReturn:
    blocked = [one.report for one in platforms if one.report.state is State.BLOCKED]
    excluded = "".join(f" Platform '{one.name}' is {one.reason}: {one.remedy}." for one in blocked)
    raise PlatformError(
        "This machine has an accelerator, but no platform for it is installed.",
        where=f"platform '{found.report.name}', which is used only if it is named",
        why=probes[found.report.name].reason,
        fix=f"{_ways_on(found, 'NAME')}.{excluded} Anytron uses the processor only if you ask for it: "
        f"platform.name=cpu, or {VARIABLE}=cpu",
    )


def _single(usable: Sequence[Choice], processors: Sequence[Choice], absent: Sequence[str]) -> Choice:
    candidates = usable or processors
    if len(candidates) > 1:
        names = [choice.platform.name for choice in candidates]
        raise PlatformError(
            f"{len(names)} platforms can be used, and Anytron does not choose between them: {', '.join(names)}.",
            why="; ".join(f"{choice.platform.name}: {choice.reason}" for choice in candidates),
            fix=_name_one(names[0]),
        )
    if not candidates:
        raise PlatformError(
            "No platform can be used.",
            why="; ".join(absent) or "no platform is installed, or all of them are blocked",
            fix="install a platform: " + ", ".join(OFFICIAL_PLATFORMS.values()),
        )
    chosen = candidates[0]
    if usable:
        reason = f"the one usable accelerator; {chosen.reason}"
    elif absent:
        reason = f"every installed accelerator is absent ({'; '.join(absent)})"
    else:
        reason = "no accelerator platform is installed"
    return replace(chosen, reason=reason)


def _name_one(name: str) -> str:
    return f"name the platform to use, for example {VARIABLE}={name} or platform.name={name}"


def settled_reports(found: Sequence[Found], probes: Mapping[str, Probe], choice: Choice | None) -> list[PluginReport]:
    """Return the plugins' reports, their states updated by the probes and by the choice of the platform.

    ``choice`` is None if no platform could be chosen.
    """
    return [_settled(candidate, probes.get(candidate.report.name), choice) for candidate in found]


def _settled(candidate: Found, probe: Probe | None, choice: Choice | None) -> PluginReport:
    report = candidate.report
    if candidate.member is None:
        return report
    if candidate.platform is None:
        return replace(report, state=State.ACTIVE, reason="extensions are always active")
    if choice is not None and candidate.platform is choice.platform:
        return replace(report, state=State.ACTIVE, reason=choice.reason)
    if probe is None:
        only_by_name = candidate.platform.chosen_by_name_only
        asked = "it is used only if it is named" if only_by_name else "another platform was asked for"
        return replace(report, reason=f"not probed: {asked}")
    states = {
        Availability.USABLE: State.AVAILABLE,
        Availability.ABSENT: State.UNAVAILABLE,
        Availability.BROKEN: State.BROKEN,
    }
    return replace(report, state=states[probe.availability], reason=probe.reason, remedy=probe.remedy)
