"""Check one rule in this process: its cases from small to large, until one fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.results import Result, in_one_line
from anytron.proof.checks import Inapplicable
from anytron_conformance.rules import Broken

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron_conformance.rules import Case, Rule
    from anytron_conformance.subject import Subject


def check_rule(rule: Rule, subject: Subject, begins: Callable[[Case], None] = lambda _case: None) -> Result:
    """Make the cases of a rule, the smallest first, and stop at the first that fails.

    Args:
        rule: The rule.
        subject: The platform.
        begins: Is told each case before it is made.

    Returns:
        The result. Whatever a platform's code raises is a failure with its traceback's end.
    """
    case: Case | None = None
    made: list[str] = []
    left_out: dict[str, str] = {}
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
        return rule.failed(*found, made=made, left_out=left_out, broken=case.name if case else None)
    reasons = "; ".join(dict.fromkeys(left_out.values())) or ("" if made else "the rule has no case here")
    return rule.result("passed" if made else "skipped", reasons, made=made, left_out=left_out)
