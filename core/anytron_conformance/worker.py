"""A process that checks rules, one after another, for the driver of the kit.

Importing this module imports no torch: the platform's environment is set before anything heavy is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import PluginError
from anytron.base.results import Result, in_one_line
from anytron.device.hooks.types import ProcessInfo
from anytron.device.loading import open_process
from anytron.device.loading.neutral import NeutralDefaults
from anytron.proof.checks import Inapplicable
from anytron.task.isolation.worker import calls, enter
from anytron_conformance.rules import Broken, find_rule
from anytron_conformance.subject import Source, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.task.isolation.worker import Answer
    from anytron_conformance.rules import Case, Rule


def main(channel: int, lifeline: int) -> None:
    """Check each rule that the driver sends as (level, name), and answer with the result as JSON.

    Arguments as for :func:`anytron.task.isolation.worker.enter`.
    """
    connection, start = enter(channel, lifeline)
    subject = open_subject(start, ProcessInfo("trainer"))

    for (level, name), give in calls(connection, start):

        def tell(case: Case, give: Answer = give) -> None:
            give({"at": case.name})

        give(check_rule(find_rule(level, name), subject, tell).as_json())
    subject.close()


def open_subject(start: Mapping[str, Any], process: ProcessInfo) -> Subject:
    """Open the platform in this process, with the environment variables of its plugins.

    Args:
        start: ``platform``, ``options`` and ``scratch``.
        process: Description of this process for the plugins.
    """
    source = Source(start["platform"], start["options"])
    try:
        session = open_process(process, source.config(), platform=source.platform, engine=None)
    except PluginError:  # of runtime_env: a rule of its own says so
        session = source.open()

    import torch

    torch.set_num_threads(start["threads"])
    return Subject(source, session, Path(start["scratch"]))


def check_rule(rule: Rule, subject: Subject, begins: Callable[[Case], None] = lambda _case: None) -> Result:
    """Check a rule in its cases, the smallest first, and stop at the first case that fails.

    Args:
        rule: The rule.
        subject: The platform.
        begins: Called with each case before it is checked.

    Returns:
        The result. An exception of the platform's code is a failure, with the end of its traceback.
    """
    case: Case | None = None
    made: list[str] = []
    left_out: dict[str, str] = {}
    subject.hooks.forget_suppliers()
    try:
        if declined := subject.declined(rule.needs):
            return rule.result("skipped", declined)
        for case in rule.cases_for(subject):
            reason = subject.declined(case.needs)
            if reason is None:
                begins(case)
                try:
                    rule.function(subject, case)
                    made.append(case.name)
                except Inapplicable as error:
                    reason = error.reason
            if reason is not None:
                left_out[case.name] = reason
    except Exception as error:  # noqa: BLE001 - whatever a platform's code raises is its result
        found = (error.what, error.difference) if isinstance(error, Broken) else (in_one_line(error),)
        blamed = {"kernels": _portable_kernels(subject)} if rule.level == "kernels" else {}
        return rule.failed(*found, made=made, left_out=left_out, broken=case.name if case else None, notes=blamed)
    reasons = "; ".join(dict.fromkeys(left_out.values())) or ("" if made else "the rule has no case for this platform")
    return rule.result("passed" if made else "skipped", reasons, made=made, left_out=left_out)


def _portable_kernels(subject: Subject) -> str:
    """Name the kernels that a rule called and that are not the platform's: its author did not write them."""
    suppliers = subject.hooks.suppliers()
    names = [kernel for kernel, plugin in suppliers.items() if plugin == NeutralDefaults.name]
    if not names:
        return ""
    return (
        f"{', '.join(names)} of '{NeutralDefaults.name}': the platform has no such kernel, so Anytron computed it with "
        "operators of torch on the device; check these, or write a kernel"
    )
