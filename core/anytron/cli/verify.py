"""``anytron verify``: print the results of the checks as a table or as JSON.

Standard output has the table and the suppliers of the kernels, or the JSON object; progress goes to the error output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.components import EXECUTORS, VERIFICATIONS, component_names, load_component
from anytron.base.errors import ConfigError
from anytron.cli.output import error_console
from anytron.cli.results import print_report, progress_of
from anytron.cli.scratch import ScratchDirectory
from anytron.config.diagnostics import refuse
from anytron.run.preflight.capabilities import verification_diagnostics
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.proof.checks import Report


def run_verification(path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Make all checks and print what they found.

    Nothing is written into ``trainer.output_dir``: the files of the checks, mainly logs of worker processes, lie in a
    temporary directory; the logs are kept if a check fails.

    Returns:
        Whether no check failed.

    Raises:
        AnytronError: The configuration, the data or the machine is not fit for the run.
    """
    notes = error_console()
    run = open_run(path, overrides)
    for line in run.lines:
        notes.print(line)
    refuse([*run.diagnostics, *verification_diagnostics(run.config)])
    config, session = run.config, run.session
    executor_class = load_component(EXECUTORS, config.executor.kind, "executor.kind")

    from anytron.proof.verification.checks import CHECKS, verify  # torch: only when nothing has been found wrong so far

    with ScratchDirectory("verify", notes) as scratch:
        trainer = config.trainer.model_copy(update={"output_dir": str(scratch.path)})
        config = config.model_copy(update={"trainer": trainer})
        with progress_of(notes, {}, as_json=as_json) as watcher:
            watcher.expects(len(CHECKS))
            report = verify(config, session, executor_class, watcher)
        return _shown(report, scratch, as_json=as_json)


def run_verification_of(framework: str, path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Check the engine of another framework as that one's own configuration says, and print what was found.

    Args:
        framework: Its name among the entry points of :data:`~anytron.base.components.VERIFICATIONS`.
        path: Its configuration.
        overrides: Of it, in its grammar.
        as_json: Print JSON.

    Returns:
        Whether no check failed.

    Raises:
        AnytronError: Nothing that is installed verifies it, or the engine cannot be built.
    """
    if framework not in component_names(VERIFICATIONS):
        raise ConfigError(
            f"A configuration of {framework} cannot be verified.",
            where=f"--{framework}",
            why=f"anytron-{framework} is not installed",
            fix=f"pip install anytron-{framework}",
        )
    notes = error_console()
    verify = load_component(VERIFICATIONS, framework, f"--{framework}")
    with ScratchDirectory("verify", notes) as scratch:
        with progress_of(notes, {}, as_json=as_json) as watcher:
            report = verify(path, overrides, scratch.path, watcher)
        return _shown(report, scratch, as_json=as_json)


def _shown(report: Report, scratch: ScratchDirectory, *, as_json: bool) -> bool:
    """Print a report, and keep the logs if a check has failed; say whether none has."""
    if not report.passed:
        scratch.keep_logs()
    return print_report(report, as_json=as_json)
