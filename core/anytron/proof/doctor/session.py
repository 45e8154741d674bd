"""Topics of a session on this machine: plugins, platform, environment, patches, and the run's configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from anytron.base.results import Result, of_error
from anytron.config.schema import default_run
from anytron.device.hooks.types import ProcessInfo
from anytron.device.loading import State, survey_plugins
from anytron.device.patches import Verdict
from anytron.device.platform import decisions_of
from anytron.device.stack import planned_patches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.base.results import Status
    from anytron.proof.doctor.subject import Subject


def examine_configuration(subject: Subject) -> Iterator[Result]:
    """Yield the diagnostics that ``anytron train`` would report for the configuration on this machine."""
    if subject.path is None:
        yield Result("configuration.file", "skipped", "no CONFIG was given: the default engines are examined")
    elif subject.misread is not None and str(subject.misread) == str(subject.broken):
        yield Result("configuration.file", "skipped", "CONFIG cannot be checked: the entry platform.choice says why")
    elif subject.misread is not None:
        yield of_error("configuration.file", subject.misread)
    else:
        yield Result(
            "configuration.file", "passed", f"{subject.path}: engine {subject.engine}, rollout {subject.rollout}"
        )
    for one in subject.diagnostics or ():
        status: Status = "failed" if one.severity == "error" else "warning"
        place = f" ({one.place})" if one.place else ""
        yield Result(f"configuration.{one.key or 'run'}", status, f"{one.message}{place}", one.fix)


PREFIXES = ("ANYTRON_", "GLOO_", "HF_", "MKL_", "OMP_", "PYTHONPATH", "PYTORCH_", "RAY_", "TORCH_", "TRANSFORMERS_")
"""Prefixes of the environment variables that are shown, besides the platform's own."""
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Parts of the names of variables whose values are never shown, because the output goes into reports."""


def examine_environment(subject: Subject) -> Iterator[Result]:
    """Yield the environment variables that are set, and those that plugins will set for a training rank."""
    prefixes: tuple[str, ...] = PREFIXES
    wanted: Mapping[str, str] = {}
    if subject.session is not None:
        platform = subject.session.platform
        prefixes = (*PREFIXES, *platform.environment_prefixes, *filter(None, [platform.visible_devices_variable]))
        run = subject.run or default_run()
        process = ProcessInfo("trainer", world_size=run.parallel.world_size)
        wanted = subject.session.hooks.runtime_env(process, run)
    for name, value in sorted(os.environ.items()):
        if name.startswith(prefixes) or name in wanted:
            secret = any(part in name.upper() for part in SECRETS)
            yield Result(f"environment.{name}", "passed", "(set)" if secret else value)
    for name, value in sorted(wanted.items()):
        if name not in os.environ:
            yield Result(f"environment.{name}", "passed", f"{value} (a plugin sets it for training ranks)")


def examine_patches(subject: Subject) -> Iterator[Result]:
    """Yield for each patch of third-party code whether it applies to the installed versions, and why.

    Raises:
        PatchError: Two owners patch one target, or an id is used twice.
    """
    rows = planned_patches(subject.opened, engine=subject.engine, rollout_engine=subject.rollout)
    for identifier in dict.fromkeys(row["id"] for row in rows):
        yield _patch(identifier, [row for row in rows if row["id"] == identifier])
    if not rows:
        yield Result("patches.none", "passed", f"nothing is patched for the engine {subject.engine}")


def _patch(identifier: str, targets: list[dict[str, Any]]) -> Result:
    """One entry for a patch: its target, and the classes that supersede it there."""
    missing = [row for row in targets if row["verdict"] == Verdict.MISSING.value]
    verdicts = "; ".join(f"{row['verdict']}: {row['target']} ({row['reason']})" for row in targets)
    status: Status = "passed" if not missing else "failed" if missing[0]["required"] else "warning"
    fix = "install a version in the range of the patch (see the entries compatibility.*), or report it to its owner"
    return Result(f"patches.{identifier}", status, f"{verdicts}. {targets[0]['purpose']}", fix if missing else "")


def examine_plugins(subject: Subject) -> Iterator[Result]:
    """Yield the state of each plugin."""
    configured = None if subject.run is None else subject.run.platform.name
    for report in survey_plugins(configured).reports:
        detail = f"{report.state.value}: {report.reason} ({report.distribution} {report.version})"
        status: Status = "failed" if report.refused else "warning" if report.state is State.INCOMPATIBLE else "passed"
        yield Result(f"plugins.{report.name}", status, detail, report.remedy if status != "passed" else "")


def examine_platform(subject: Subject) -> Iterator[Result]:
    """Yield the active platform and why it was chosen, its decisions, and the hidden packages of other devices.

    Raises:
        HookContractError: The platform's ``decisions()`` returned something other than decisions.
    """
    if subject.session is None:
        assert subject.broken is not None
        yield of_error("platform.choice", subject.broken)
        return
    session = subject.session
    yield Result("platform.choice", "passed", f"{session.platform.name}: {session.choice_reason}")
    for decision in decisions_of(session.platform):
        yield Result(f"platform.{decision.name}", "passed", f"{decision.value}: {decision.reason}")
    for name in session.hidden:
        detail = "hidden from all processes: it adds another device to torch"
        yield Result(f"platform.hidden.{name}", "passed", detail)
