"""Check one rule in this process: its cases from small to large, until one fails."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

from anytron.base.errors import AnytronError
from anytron.proof.conformance.results import RuleResult
from anytron.proof.conformance.rules import Broken, Inapplicable
from anytron.proof.verification.report import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.proof.conformance.rules import Case, Rule
    from anytron.proof.conformance.subject import Subject


def check_rule(rule: Rule, subject: Subject, begins: Callable[[Case], None] = lambda _case: None) -> RuleResult:
    """Make the cases of a rule, the smallest first, and stop at the first that fails.

    Args:
        rule: The rule.
        subject: The platform.
        begins: Is told each case before it is made.

    Returns:
        What came of it. Whatever a platform's code raises is a failure with its traceback's end.
    """
    start = time.monotonic()
    case: Case | None = None
    made: list[str] = []
    left_out: dict[str, str] = {}
    try:
        declined = subject.declined(rule.needs)
        for case in [] if declined else rule.cases_for(subject):
            reason = subject.declined(case.needs)
            if reason is None:
                begins(case)
                try:
                    rule.check(subject, case)
                    made.append(case.name)
                except Inapplicable as error:
                    reason = error.reason
            if reason is not None:
                left_out[case.name] = reason
    except Exception as error:  # noqa: BLE001 - whatever a platform's code raises is its result
        reason, difference = _told(error)
        return RuleResult.failed(
            rule,
            reason,
            cases=len(made) + 1,
            skipped=len(left_out),
            case=case.name if case else "",
            difference=difference,
            made=made,
            left_out=left_out,
            seconds=time.monotonic() - start,
        )
    return RuleResult(
        rule=rule.name,
        level=rule.level,
        status=Status.PASSED if made else Status.SKIPPED,
        contract=rule.contract,
        docs=rule.docs,
        cases=len(made),
        skipped=1 if declined else len(left_out),
        reason=declined or "; ".join(dict.fromkeys(left_out.values())) or ("" if made else "the rule has no case here"),
        made=made,
        left_out=left_out,
        seconds=time.monotonic() - start,
    )


def _told(error: Exception) -> tuple[str, str]:
    """Say what was found, and how far off it is or why it is so."""
    if isinstance(error, Broken):
        return error.what, error.difference
    return (error.headline, error.why) if isinstance(error, AnytronError) else (raised(error), "")


def raised(error: BaseException) -> str:
    """Say what was raised, and where: the innermost line, which is usually the platform's.

    Where it is the kit's, that line shows what the kit did with the platform's answer.
    """
    if isinstance(error, AnytronError):
        return " ".join(part for part in (error.headline, error.why) if part)
    frames = traceback.extract_tb(error.__traceback__)
    place = f", at {frames[-1].line!r} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = str(error).strip().splitlines()
    return f"It raised {type(error).__name__}: {message[0] if message else 'without a message'}{place}"
