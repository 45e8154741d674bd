"""The rehearsal of a run, before a worker starts: seconds, one line, and a refusal of what is certain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import within
from anytron.run.preflight.rehearsal import TrialProcesses, rehearse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.record.tracking.progress import Progress
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.preflight.rehearsal import Rehearsed
    from anytron.run.preflight.trial import Trial
    from anytron.run.preflight.validation import ValidationSet
    from anytron.task.rewards.scoring import RewardWorkers

TRAINING = "training"


def require_earnable(
    config: RunConfig,
    prepared: PreparedRun,
    examined: Sequence[ValidationSet],
    running: RewardWorkers,
    logs: Path,
    progress: Progress,
) -> None:
    """Try the rewards of training and of validation on some prompts, and say in one line what was found.

    Args:
        config: The run.
        prepared: What training needs of it.
        examined: Its validation sets.
        running: The processes that score training's responses.
        logs: Where the processes of the user's functions write what they print, as long as they are tried.
        progress: Prints the line.

    Raises:
        DataError: A function fails for every right answer that was tried, or cannot be called.
    """
    subjects = {TRAINING: prepared, **{one.section.title: one.prepared for one in examined}}
    with TrialProcesses(logs, config.executor.start_timeout_s, running) as processes:
        done = rehearse(subjects, processes, brief=True, has_environment=config.environment is not None)
    for subject, one in done.items():
        for refusal in filter(None, (trial.refusal() for trial in one.trials)):
            if subject == TRAINING:
                raise refusal
            with within(subject):
                raise refusal
    late = [f"{where}: {trial.name} gave no answer in time" for where, trial in _trials(done) if not trial.tried]
    troubles = [
        f"{where}: {found.what.rstrip('.')} ({found.count}, prompt {found.rows[0][0]})"
        for where, one in done.items()
        for found in one.found.findings
    ]
    tried = [f"{where}: {trial.name} ({trial.tried})" for where, trial in _trials(done) if trial.tried]
    if troubles:
        progress.warn(f"rehearsal: {'; '.join([*troubles, *late])}. anytron data check says more")
    elif tried or late:
        good = [f"can be earned, and not for nothing (prompts tried): {', '.join(tried)}"] if tried else []
        progress.note(f"rehearsal: {'; '.join([*good, *late])}")


def _trials(done: Mapping[str, Rehearsed]) -> Iterator[tuple[str, Trial]]:
    return ((where, trial) for where, one in done.items() for trial in one.trials)
