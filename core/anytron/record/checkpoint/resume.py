"""Determine where a run begins: at its first step, or at a checkpoint, as the key ``resume`` says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.algorithms.kl import ADAPTS
from anytron.base.errors import CheckpointError, ConfigError
from anytron.record.checkpoint.differences import differences, is_free, is_identity
from anytron.record.checkpoint.directory import Checkpoint, CheckpointDirectory, locate
from anytron.record.tracking.claim import overwritten
from anytron.record.tracking.record import RunRecord
from anytron.record.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anytron.config.schema import RunConfig
    from anytron.record.checkpoint.manifest import DriverState
    from anytron.record.tracking.claim import ClaimedDirectory
    from anytron.record.tracking.record import Change
    from anytron.task.data.beginning import Beginning


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        checkpoint: The checkpoint from which the run continues; None = it begins at the first step.
        state: The driver's state in that checkpoint; None without a checkpoint.
        in_place: True: the checkpoint is the run's own, and the run's files are continued. False: the run is a new one.
        changes: Changes of the configuration since the last start.
        since: Changes since the checkpoint was written; unlike ``changes``, they include those of an earlier
            continuation that saved no checkpoint.
        finished: Number of steps of the run if all are done and the model is saved; None if there is work left.
    """

    checkpoint: Checkpoint | None = None
    state: DriverState | None = None
    in_place: bool = False
    changes: tuple[Change, ...] = ()
    since: tuple[Change, ...] = ()
    finished: int | None = None

    @property
    def step(self) -> int:
        """Number of completed training steps."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def weights_version(self) -> int:
        """Number of completed optimizer updates of the weights from which the last responses were sampled."""
        return 0 if self.state is None else self.state.weights_version

    def metrics(self, last: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the last completed step, as far as they are known.

        An adaptive KL coefficient continues from these metrics, unless its settings in the configuration have changed.

        Args:
            last: The last metrics that the run has recorded; empty for a new run.
        """
        known = last or ({} if self.state is None else self.state.kl)
        forgotten = any(change.key.startswith("algorithm.kl_") for change in self.since)
        return {name: value for name, value in known.items() if not forgotten or name not in ADAPTS}

    def open(self, config: RunConfig, claimed: ClaimedDirectory, beginning: Beginning) -> RunDirectory:
        """Open the run's directory and remove records of later steps or, for a new run, all files of an earlier one."""
        if self.in_place:
            return RunDirectory.resume(claimed, config, self.step, self.changes, beginning)
        claimed.clear(logs=config.trainer.overwrite and config.resume == "never")
        return RunDirectory.begin(claimed, config, None if self.checkpoint is None else self.checkpoint.path, beginning)


def first_beginning(config: RunConfig) -> Beginning | None:
    """Return time and chat template at the beginning of the run that is continued; None for a run that begins now.

    A new run that starts from the checkpoint of another run continues that run's prompts. So it takes over both from
    that run, unless the data or the tokenizer differ.

    Raises:
        ConfigError: The record of the run to continue is damaged.
        CheckpointError: There is no checkpoint where one is needed, or it is damaged.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        record = RunRecord.read(Path(config.trainer.output_dir))
        return None if record is None else record.beginning
    state = locate(Path(config.resume)).state()
    changes = differences(state.config, config.model_dump(mode="json"))
    others = any(change.key.startswith(("data.", "model.tokenizer", "model.path")) for change in changes)
    return None if others else state.beginning


def choose_start(config: RunConfig, claimed: ClaimedDirectory, tell: Callable[[str], None]) -> Start:
    """Decide where a run begins.

    Args:
        config: Configuration of the run.
        claimed: The run's output directory, whose lock is held, so that no other process saves or resumes there.
        tell: Receives messages for the user.

    Raises:
        ConfigError: The directory holds an earlier run, or the configuration differs from that of the run to continue.
        CheckpointError: There is no checkpoint where one is needed, or it is damaged.
    """
    if config.resume == "never":
        _refuse_earlier_run(config, claimed)
        return Start()
    if config.resume == "auto":
        return _continue(config, claimed, tell)
    checkpoint, own = locate(Path(config.resume)), CheckpointDirectory.of(config)
    if checkpoint.path.parent.resolve() == own.path.resolve() and claimed.record is not None:
        return _continue_from(checkpoint, config, claimed, tell)
    _refuse_earlier_run(config, claimed)
    return _branch(checkpoint, config, tell)


def _refuse_earlier_run(config: RunConfig, claimed: ClaimedDirectory) -> None:
    files = claimed.earlier_files
    if files and not config.trainer.overwrite:
        raise ConfigError(
            "The output directory holds an earlier run.",
            where=f"trainer.output_dir = {claimed.path}",
            why=f"it has {', '.join(files)}",
            fix="set resume=auto to continue that run, another trainer.output_dir, or trainer.overwrite=true "
            "to delete it",
        )
    own = CheckpointDirectory.of(config)
    if config.checkpoint.path is not None and own.complete():
        raise ConfigError(
            "The checkpoint directory holds checkpoints of an earlier run.",
            where=f"checkpoint.path = {own.path}",
            why=f"it has {', '.join(checkpoint.path.name for checkpoint in own.complete())}",
            fix="set checkpoint.path to a different directory"
            + (", or delete these checkpoints" if config.resume == "never" else ""),
        )
    if config.resume not in ("never", "auto") and overwritten(claimed.path, Path(config.resume)):
        raise ConfigError(
            "trainer.overwrite would delete the checkpoint that resume names.",
            where=f"resume = {config.resume}",
            fix="set another trainer.output_dir",
        )


def _continue(config: RunConfig, claimed: ClaimedDirectory, tell: Callable[[str], None]) -> Start:
    record = claimed.record
    if record is None or not claimed.earlier_files:
        tell(f"nothing to resume in {claimed.path}: the run begins at step 1")
        return Start()
    changes = _accepted(config, claimed, tell)
    own = CheckpointDirectory.of(config)
    own.sweep(tell)
    checkpoint = own.newest_good(tell)
    if checkpoint is not None:
        return _at(checkpoint, config, claimed, changes)
    if record.finished_step is not None and config.trainer.total_steps <= record.finished_step:
        return Start(changes=changes, finished=record.finished_step, in_place=True)
    if record.finished_step is not None:
        raise CheckpointError(
            "The run is finished and has no checkpoint from which more steps could be trained.",
            where=f"trainer.output_dir = {claimed.path}",
            why=f"it ended after step {record.finished_step}, and {own.path} has no checkpoint",
            fix="to start over, set resume=never and trainer.overwrite=true",
        )
    if record.started_from is not None:
        tell(f"no checkpoint of this run is complete: it begins again with the checkpoint {record.started_from}")
        return _branch(locate(Path(record.started_from)), config, tell)
    tell("no checkpoint of this run is complete: it begins again at step 1")
    return Start()


def _continue_from(
    checkpoint: Checkpoint, config: RunConfig, claimed: ClaimedDirectory, tell: Callable[[str], None]
) -> Start:
    """Continue the run that a checkpoint belongs to, in its own directory: from the last one only."""
    later = [other for other in CheckpointDirectory.of(config).complete() if other.step > checkpoint.step]
    if later:
        raise CheckpointError(
            "Continuing from this checkpoint would delete later checkpoints of the same run.",
            where=f"resume = {config.resume}",
            why=f"the run also has {', '.join(other.path.name for other in later)}",
            fix="set resume=auto to continue from the newest checkpoint; or, to start a new run from this one, set "
            f"{_elsewhere(config)}",
        )
    changes = _accepted(config, claimed, tell)
    checkpoint.verify()
    return _at(checkpoint, config, claimed, changes)


def _at(checkpoint: Checkpoint, config: RunConfig, claimed: ClaimedDirectory, changes: tuple[Change, ...]) -> Start:
    finished_step = None if claimed.record is None else claimed.record.finished_step
    total = config.trainer.total_steps
    finished = checkpoint.step > total or (checkpoint.step == total and finished_step == total)
    done = checkpoint.step if finished else None
    state = checkpoint.state()
    since = tuple(differences(state.config, config.model_dump(mode="json")))
    return Start(checkpoint, state, in_place=True, changes=changes, since=since, finished=done)


def _branch(checkpoint: Checkpoint, config: RunConfig, tell: Callable[[str], None]) -> Start:
    """Start a new run from a checkpoint of another one: what it is taught may change, the model may not."""
    checkpoint.verify()
    state = checkpoint.state()
    changes = tuple(differences(state.config, config.model_dump(mode="json")))
    _refuse(
        [change for change in changes if is_identity(change.key)],
        "The checkpoint belongs to another model.",
        "undo the change: a new run may change data, rewards and learning rates, but not the model",
    )
    if checkpoint.step >= config.trainer.total_steps:
        raise ConfigError(
            "No steps are left to train after the checkpoint.",
            where="trainer.total_steps",
            why=f"it is {config.trainer.total_steps}, and the checkpoint was saved after step {checkpoint.step}",
            fix=f"set trainer.total_steps to more than {checkpoint.step}",
        )
    _show(changes, tell)
    return Start(checkpoint, state, changes=changes, since=changes)


def _accepted(config: RunConfig, claimed: ClaimedDirectory, tell: Callable[[str], None]) -> tuple[Change, ...]:
    """The changes since the run was last started, none of which may make it another run."""
    assert claimed.record is not None, "a directory with a run's files has its record"
    changes = differences(claimed.record.config, config.model_dump(mode="json"))
    start = "never" if any(is_identity(change.key) for change in changes) else "PATH, a checkpoint of that run"
    _refuse(
        [change for change in changes if not is_free(change.key)],
        "The configuration differs from the one of the run in the output directory.",
        f"undo the change; or, for a new run, set {_elsewhere(config)}, and resume={start}",
    )
    _show(changes, tell)
    return tuple(changes)


def _elsewhere(config: RunConfig) -> str:
    """Say which keys must name other directories so that a run does not write into this run's."""
    if config.checkpoint.path is None:
        return "trainer.output_dir to a different directory"
    return "trainer.output_dir and checkpoint.path to different directories"


def _refuse(changes: Sequence[Change], what: str, fix: str) -> None:
    if changes:
        keys = ", ".join(change.key for change in changes)
        raise ConfigError(what, where=keys, why="; ".join(map(str, changes)), fix=fix)


def _show(changes: Sequence[Change], tell: Callable[[str], None]) -> None:
    for change in changes:
        if change.key != "resume":
            tell(f"changed since the checkpoint: {change}")
