"""``anytron doctor``: report what is installed, where it is, and what would stop a run."""

from __future__ import annotations

import json
import os
import platform as machine
import sys
from collections import defaultdict
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution, distributions, packages_distributions, requires
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer
from packaging.requirements import Requirement as Dependency
from packaging.utils import canonicalize_name

import anytron
from anytron.cli.patches import planned_patches
from anytron.errors import AnytronError
from anytron.hooks.types import ProcessInfo
from anytron.patches import Verdict
from anytron.platform import decisions_of
from anytron.plugins import check_requirements, open_session, survey_plugins

if TYPE_CHECKING:
    from collections.abc import Iterable

VARIABLES = ("ANYTRON_", "GLOO_", "HF_", "MKL_", "OMP_", "PYTHONPATH", "PYTORCH_", "TORCH_", "TRANSFORMERS_")
"""Prefixes of environment variables that change how a run behaves, besides those of the platform."""

Findings = dict[str, Any]


def examine() -> Findings:
    """Examine this machine. This changes nothing, and torch is the only heavy package that it imports.

    Returns:
        JSON values: ``anytron``, ``python``, ``system``, ``platform`` (None if none can be used),
        ``packages``, ``plugins``, ``requirements`` (of active plugins: needed, found, where),
        ``patches`` (planned for a training process), ``environment`` and
        ``problems`` (what would stop a run; empty if nothing would).
    """
    findings: Findings = {
        "anytron": anytron.__version__,
        "python": f"{machine.python_version()} ({sys.executable})",
        "system": machine.platform(),
        "platform": None,
        "patches": [],
        "problems": [],
    }
    needed = {Dependency(line).name for line in requires("anytron") or () if "extra ==" not in line}
    variables: set[str] = set()
    try:
        reports = survey_plugins().reports
        findings["plugins"] = [report.as_json() for report in reports]
        findings["requirements"] = [
            f"{one.plugin}: {one.as_line()}" for report in reports for one in report.requirements
        ]
        session = open_session()
        runtime = session.platform.runtime()
        findings["platform"] = {
            "name": session.platform.name,
            "reason": session.choice_reason,
            "device": runtime.device_name(),
            "devices": session.probe.devices,
            "decisions": [asdict(decision) for decision in decisions_of(session.platform)],
            "hidden": list(session.hidden),
        }
        needed |= {requirement.package for _, requirement in session.hooks.requirements()}
        variables |= {session.platform.visible_devices_variable or ""}
        variables |= set(session.hooks.runtime_env(ProcessInfo("trainer")))
        check_requirements(session.hooks)
        findings["patches"] = planned_patches(session)
        findings["problems"] += [
            f"patch {row['id']} cannot be applied to {row['target']}: {row['reason']}"
            for row in findings["patches"]
            if row["required"] and row["verdict"] == Verdict.MISSING.value
        ]
    except AnytronError as error:
        findings["problems"].append(str(error))
    findings["packages"] = _packages(needed)
    findings["problems"] += [
        f"{package['name']} is installed more than once: {', '.join(package['locations'])}"
        for package in findings["packages"]
        if len(package["locations"]) > 1
    ]
    findings["environment"] = {
        name: value for name, value in sorted(os.environ.items()) if name in variables or name.startswith(VARIABLES)
    }
    return findings


def _packages(names: Iterable[str]) -> list[dict[str, Any]]:
    """Find where each package is, by its metadata and by the import system, without importing any."""
    modules: dict[str, list[str]] = defaultdict(list)
    for module, owners in packages_distributions().items():
        for owner in set(owners):
            modules[canonicalize_name(owner)].append(module)
    rows: list[dict[str, Any]] = []
    for name in sorted({canonicalize_name(name) for name in names} | {"anytron"}):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            rows.append({"name": name, "version": None, "locations": [], "modules": {}})
            continue
        # A directory that is on sys.path twice is one place.
        locations = {str(other.locate_file("")) for other in distributions(name=name)}
        origins = {module: _origin(module) for module in sorted(modules[name]) if module.isidentifier()}
        rows.append({"name": name, "version": found.version, "locations": sorted(locations), "modules": origins})
    return rows


def _origin(module: str) -> str | None:
    """Find the file that ``import module`` would load; None if there is none."""
    try:
        spec = find_spec(module)
    except ValueError:  # an imported module without a spec
        return getattr(sys.modules[module], "__file__", None)
    if spec is None:
        return None
    return spec.origin or ", ".join(spec.submodule_search_locations or ())


def print_findings(findings: Findings, *, as_json: bool) -> None:
    """Print the findings, as JSON or for a person."""
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
        return
    active = findings["platform"]
    lines = [f"{name:<9} {findings[name]}" for name in ("anytron", "python", "system")]
    if active is None:
        lines.append("platform  none")
    else:
        lines.append(f"platform  {active['name']} ({active['reason']})")
        lines.append(f"device    {active['device']}, {active['devices']} usable")
        lines += [f"{one['name']:<9} {one['value']} ({one['reason']})" for one in active["decisions"]]
        lines += [f"hidden    {name}, which belongs to another device" for name in active["hidden"]]
    lines.append("\npackages")
    for package in findings["packages"]:
        where = ", ".join(package["locations"]) or "-"
        lines.append(f"  {package['name']:<20} {package['version'] or 'not installed':<16} {where}")
    lines.append("\nplugins")
    lines += [
        f"  {plugin['name']:<20} {plugin['state']:<16} {plugin['reason']}" for plugin in findings.get("plugins", ())
    ]
    lines.append("\npackages that active plugins need")
    lines += [f"  {line}" for line in findings.get("requirements", ())]
    lines.append("\npatches of a training process")
    lines += [
        f"  {patch['id']}: {patch['verdict']} ({patch['reason']})\n    {patch['purpose']}"
        for patch in findings["patches"]
    ]
    lines.append("\nenvironment")
    lines += [f"  {name}={value}" for name, value in findings["environment"].items()]
    lines.append("\nproblems")
    lines += [f"  {problem}" for problem in findings["problems"]] or ["  none"]
    typer.echo("\n".join(lines))
