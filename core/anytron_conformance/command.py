"""``anytron conformance``: check a platform against the contract, rule by rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from anytron.base.errors import ConfigError
from anytron.cli.checks import print_report, progress_of
from anytron.cli.output import ScratchDirectory, error_console
from anytron.proof.checks import Report

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_conformance(platform: str, options: Sequence[str], levels: Sequence[str], *, as_json: bool) -> bool:
    """Check all rules of some levels, and print the results.

    The standard output has the table and the failures, or the JSON object; progress goes to the error output.

    Returns:
        Whether no rule is broken.

    Raises:
        AnytronError: The platform is not installed or its device not there; there is no such level or option.
        KeyboardInterrupt: Ctrl-C. The rules that had been checked are printed; all processes have ended.
    """
    from anytron_conformance.levels import checked_levels, rules_of
    from anytron_conformance.subject import Source

    asked = checked_levels(levels)
    source = Source(platform, _parsed(options))
    session = source.open()
    notes = error_console()
    notes.print(f"platform: {platform} ({session.probe.reason})")
    with progress_of(notes, {"platform": platform}, as_json=as_json) as watcher:
        watcher.expects(sum(len(rules_of(level)) for level in asked))  # torch: only when nothing has been found wrong

        from anytron_conformance.run import run

        with ScratchDirectory("conformance", notes) as scratch:
            (scratch.path / "logs").mkdir()
            report = Report(run(source, asked, scratch.path / "logs", watcher), {"platform": platform})
            if not report.passed:
                scratch.keep_logs()
    return print_report(report, as_json=as_json)


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise ConfigError(f"'{option}' is no KEY=VALUE.", where="command line", fix="write, for example, tile=8")
        found[key] = yaml.safe_load(value)
    return found
