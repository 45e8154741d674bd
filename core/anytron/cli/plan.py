"""``anytron plan``: the memory that a run will need on its devices, and what to change if it is too much."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import typer

from anytron.base.errors import AnytronError, ConfigError
from anytron.cli.output import print_table
from anytron.proof.doctor.devices import device_memory
from anytron.proof.doctor.live import Live
from anytron.proof.doctor.subject import look
from anytron.proof.planning import as_installed, make_plan, remedies
from anytron.run.preflight.prepare import prepare, prepare_prompts
from anytron.workers.engines.estimates import DeviceMemory, readable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.proof.doctor.subject import Subject
    from anytron.proof.planning import DevicePlan, Plan, Remedy

PROMPTS = 256
"""Number of prompts whose mean length is measured."""
_UNITS = {"": 30, "g": 30, "gib": 30, "gb": 30, "m": 20, "mib": 20, "mb": 20, "t": 40, "tib": 40, "tb": 40}


def run_plan(path: Path, overrides: Sequence[str], *, memory: str | None, as_json: bool) -> bool:
    """Print the plan, as a table or as one JSON object.

    Args:
        path: The YAML file of the run.
        overrides: Keys to set in it.
        memory: Memory of each device, in the form that :func:`parse_size` reads; None = memory of the devices here.
        as_json: Print JSON.

    Returns:
        Whether the run fits, as far as is known.

    Raises:
        ConfigError: The file is not a valid configuration, or the run's memory cannot be estimated.
    """
    subject = look(path, overrides)
    if subject.run is None:
        raise subject.misread or ConfigError(
            "The configuration could not be read.",
            where=str(path),
            fix="run anytron config show CONFIG, which says why",
        )
    device, unknown = _device(subject, memory)
    prompts, unread = _mean_prompt(subject.run)
    run, other_engine = as_installed(subject.run)
    assumed = list(filter(None, [other_engine, _other_platform(subject)]))
    plan = make_plan(run, device, prompts)

    def replan(more: Sequence[str]) -> Plan | None:
        changed = look(path, [*overrides, *more])
        if changed.run is None or (changed.diagnostics is None) != (subject.diagnostics is None):
            return None
        try:
            return make_plan(as_installed(changed.run)[0], device, prompts)
        except AnytronError:
            return None

    alone, together = remedies(run, plan, replan)
    if as_json:
        typer.echo(json.dumps(_as_json(plan, assumed, alone, together), indent=2))
    else:
        _print(plan, assumed, unknown, unread, alone, together)
    return plan.fits is not False


def parse_size(text: str) -> int:
    """Read a size of memory, ``80``, ``80GiB`` or ``512M``, in bytes; powers of 1024, by default GiB.

    Raises:
        ConfigError: ``text`` is not a valid memory size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ConfigError(
            "This is not a valid memory size.",
            where="--memory",
            why=f"'{text}' is not a number above 0 with a unit (M, G or T); a number without a unit is in GiB",
            fix="write, for example, 80GiB",
        )
    return int(float(match[1]) * 2 ** _UNITS[match[2].lower()])


def _device(subject: Subject, memory: str | None) -> tuple[DeviceMemory, str]:
    if memory is None:
        with Live(subject) as live:
            return device_memory(subject, live)
    return DeviceMemory(parse_size(memory), subject.session is None or subject.session.platform.accelerator), ""


def _mean_prompt(run: RunConfig) -> tuple[float | None, str]:
    """Mean number of tokens of some prompts of the run, or the reason why they cannot be read."""
    try:
        drawn = (prepare_prompts(run) if run.supervised else prepare(run)).sampler.draw(PROMPTS)
    except AnytronError as error:
        return None, error.what
    return sum(len(prompt.tokens) for prompt in drawn) / len(drawn), ""


def _other_platform(subject: Subject) -> str:
    """What is assumed of a platform that cannot be used here."""
    if subject.session is not None:
        return ""
    why = subject.broken.what if isinstance(subject.broken, AnytronError) else repr(subject.broken)
    return f"the platform cannot be used here, so the plan assumes accelerators with memory that is theirs alone: {why}"


def _as_json(plan: Plan, assumed: Sequence[str], alone: Sequence[Remedy], together: Remedy | None) -> dict[str, Any]:
    def remedy(one: Remedy) -> dict[str, Any]:
        return {"overrides": list(one.overrides), "needed_bytes": one.needed, "fits": one.fits}

    return {
        "parameters": plan.parameters,
        "needed_bytes": plan.needed,
        "fits": plan.fits,
        "no_estimate": list(plan.silent),
        "assumed": list(assumed),
        "devices": [
            {
                "name": device.name,
                "needed_bytes": device.needed,
                "device_bytes": device.total,
                "fits": device.fits,
                "processes": [
                    {
                        "who": share.who,
                        "count": share.count,
                        "peak_bytes": share.peak,
                        "parts": [
                            {"name": part.name, "bytes": part.size, "when": part.when, "exact": part.exact}
                            | {"how": part.how}
                            for part in share.parts
                        ],
                    }
                    for share in device.shares
                ],
            }
            for device in plan.devices
        ],
        "remedies": [remedy(one) for one in alone],
        "together": None if together is None else remedy(together),
    }


def _print(
    plan: Plan, assumed: Sequence[str], unknown: str, unread: str, alone: Sequence[Remedy], together: Remedy | None
) -> None:
    typer.echo(f"{plan.parameters:,} parameters")
    for assumption in assumed:
        typer.echo(assumption)
    if unread:
        typer.echo(f"prompts cannot be read here, so micro-batches are taken to be full: {unread}")
    for device in plan.devices:
        _print_device(device)
        typer.echo(_verdict(device, unknown))
    for engine in plan.silent:
        typer.echo(f"not counted: the engine {engine} gives no estimate")
    if alone:
        typer.echo("\nsettings that need less memory, each alone:")
        for one in alone:
            fits = "" if one.fits is None else ", fits" if one.fits else ", too large"
            typer.echo(f"  {one.overrides[0]:<46} {readable(one.needed)}{fits}")
    if together is not None and len(together.overrides) > 1:
        typer.echo(f"it fits with: {' '.join(together.overrides)} ({readable(together.needed)})")
    elif plan.fits is False and together is None:
        typer.echo("no combination of these settings fits: use more devices, or a smaller model")


def _print_device(device: DevicePlan) -> None:
    from rich.table import Table

    title = "the machine" if device.name == "machine" else f"a device of {device.name}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in ("process", "part"):
        table.add_column(column, no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("of", overflow="fold")
    for share in device.shares:
        who = share.who if share.count == 1 else f"{share.who} x {share.count}"
        for index, part in enumerate(share.parts):
            size = readable(part.size) if part.exact else f"~ {readable(part.size)}"
            table.add_row("" if index else who, part.name, size, part.when, part.how)
        table.add_row("", "at most", readable(share.peak), "", "training and generation take turns", style="bold")
    print_table(table)


def _verdict(device: DevicePlan, unknown: str) -> str:
    needs = f"{device.crowd}: about {readable(device.needed)}"
    if device.total is None:
        return f"{needs}; the memory of a device is not known ({unknown}): set it with --memory"
    verdict = "it is too large" if not device.fits else "it fits, with little room" if device.tight else "it fits"
    return f"{needs} of {readable(device.total)}: {verdict}"
