"""``anytron doctor``: print what :mod:`anytron.proof.doctor` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.cli.results import print_report
from anytron.proof.checks import Report
from anytron.proof.doctor.examination import examine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_doctor(path: Path | None, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Examine this machine and print the results.

    Returns:
        Whether nothing failed.
    """
    return print_report(Report([*examine(path, overrides)]), as_json=as_json)
