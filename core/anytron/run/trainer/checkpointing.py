"""Save checkpoints: at intervals, at a signal, before an error ends the run, and after the last step."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from typing import TYPE_CHECKING, Protocol

from typing_extensions import Self

from anytron.algorithms.kl import to_remember
from anytron.base.errors import AnytronError, DataError, ProcessLost, ResourceError, WorkerError
from anytron.base.files import publish_directory
from anytron.record.checkpoint.directory import CHECKPOINTS, CheckpointDirectory
from anytron.record.checkpoint.manifest import DriverState, SourceState
from anytron.record.validation import is_better
from anytron.run.preflight.capabilities import can_save_checkpoints, saves_checkpoints
from anytron.run.trainer.interruptions import StopRequested, StopSignals
from anytron.run.trainer.models import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from anytron.base.errors import LostDirectoryError
    from anytron.config.schema import RunConfig
    from anytron.record.checkpoint.directory import Best
    from anytron.record.checkpoint.resume import Start
    from anytron.record.tracking.record import Change
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.task.data.mixture import Mixture, Place


class PlaceInData(Protocol):
    """The place of a run in its data."""

    @property
    def sampler(self) -> Mixture:
        """The source of prompts."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The place in each source of prompts at which the next step begins."""


class Checkpointing:
    """Saves the run's state at the boundaries between steps. A context manager around the steps.

    A save begins at a boundary, when the metrics of the step are on disk, and is completed at a later point of the loop
    once the engine has written its files. If the ``with`` block is ended by a signal, or by an error before the
    step's updates, the state of the last boundary is saved, unless it has been saved already. After a signal the block
    ends without an error, otherwise with the error. A process that is lost after a signal is an error that ends the
    run.

    Every boundary checks whether the run's directory was removed or replaced. If so, the block ends with an error, and
    the state in memory is saved into a directory beside it.

    Args:
        config: The run's configuration.
        trainer: The training engine.
        data: Sampler of the prompts, and its position in the data.
        run: The run's directory.
        tell: Called with a message about every checkpoint.

    Attributes:
        stopped_by: Name of the signal that ended the steps; None if no signal has.
        last: Number of completed steps at the last complete checkpoint of the run; 0 without one.
    """

    stopped_by: str | None = None

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainingWorkers,
        data: PlaceInData,
        run: RunDirectory,
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._settings = config, config.checkpoint
        self._trainer, self._data, self._run, self._tell = trainer, data, run, tell
        self._enabled, self._able = saves_checkpoints(config), can_save_checkpoints(config)
        self._directory = CheckpointDirectory.of(config)
        self._signals = StopSignals(handled=self._enabled and self._settings.on_signal)
        self._boundary: DriverState | None = None  # the state there, while nothing has changed it
        self._pending: DriverState | None = None  # being written
        self._best: Best | None = None  # to be marked when its checkpoint is complete
        self._no_room: ResourceError | None = None
        self._saved_at = time.monotonic()
        self.last = 0

    def restore(self, start: Start) -> None:
        """Restore the engine, and the sampler's place in the data; delete the files of an interrupted save.

        If a key of ``data`` has changed since the checkpoint, or ``rollout.max_new_tokens`` has and other prompts fit,
        prompts are drawn from the beginning.

        Raises:
            EngineError: The checkpoint belongs to another model.
            CheckpointError: The file that names the best checkpoint is damaged.
            DataError: The prompts have changed for another reason.
        """
        if start.checkpoint is not None and start.state is not None:
            self._trainer.load_checkpoint(str(start.checkpoint.training))
            if not any(change.key.startswith("data.") for change in start.since):
                self._seek(start.state.sampler, start.since)
            self.last = start.step if start.in_place else 0
        if self._enabled:
            self._directory.sweep(self._tell)

    def boundary(self, step: int, weights_version: int, metrics: Mapping[str, float]) -> None:
        """Save a checkpoint if one is due.

        Args:
            step: Number of completed steps, whose metrics are written.
            weights_version: Number of completed optimizer updates of the weights that generated the last responses.
            metrics: Metrics of the last step.

        Raises:
            StopRequested: A signal has asked the run to end.
            EngineError: A checkpoint could not be written.
            LostDirectoryError: The run's directory, or a file in it, was removed or replaced.
        """
        self._note_boundary(step, weights_version, metrics)
        self._run.require_place()
        self._signals.check()
        if self._due(step):
            self._save(asynchronous=self._settings.asynchronous)
        else:
            self._complete(wait=False)

    def keep_best(self, found: Best) -> None:
        """Mark the checkpoint of the last boundary as the best, if it is better than the marked one.

        If it is not saved yet, it is saved right before the next updates: then rollout engines have left the
        devices, and the training state is back on them (``rollout.sleep``, ``engine.offload``). Marking again with the
        same result, as a resumed run does, has no effect.

        Args:
            found: Result of the validation.
        """
        if self._best is not None:
            self._complete(wait=True)  # it may be the one to beat
        before = self._directory.best()
        if not self._enabled or self._boundary is None or (before is not None and not _beats(found, before[0])):
            return
        self._best = found
        if self.last == found.step:
            self._rotate(found.step)

    @contextlib.contextmanager
    def abandonable(self) -> Iterator[None]:
        """Context for the last part of a step before its updates; a signal ends it as in :meth:`interruptible`.

        If :meth:`keep_best` marked a best checkpoint in this part, the checkpoint is saved at the end of the part.
        """
        with self.interruptible():
            yield
        self._save_best()
        self._complete(wait=False)
        self._boundary = None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context for a part of a step before any change of state: a signal ends it, and the step, at once."""
        with self._signals.interrupt():
            yield

    def finish(self, step: int, weights_version: int, metrics: Mapping[str, float]) -> None:
        """Save the state after the last step, and wait until it is on disk. Raises as :meth:`boundary` does."""
        self._note_boundary(step, weights_version, metrics)
        self._run.require_place()
        self._save_boundary()
        self._signals.check()

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        try:
            if isinstance(error, (Exception, StopRequested)) and (lost := self._run.lost()) is not None:
                raise self._rescued(lost) from error
            if isinstance(error, StopRequested):
                self.stopped_by = self._signals.received
                self._save_boundary()
                return True
            if isinstance(error, Exception):
                self._save_before(error)
            elif error is None and self._no_room is not None:
                raise self._no_room
        except ProcessLost as lost:
            error = lost
        finally:
            self._signals.__exit__()
        if isinstance(error, ProcessLost) and self._signals.received is not None:
            raise WorkerError(  # no reason to start again: the run was to end
                error.what,
                where=error.where,
                why=f"{self._signals.received} had asked the run to end\n{error.why}",
                fix="continue from the last checkpoint: resume=auto",
            ) from error
        return False

    def _seek(self, states: Sequence[SourceState], changes: Sequence[Change]) -> None:
        """Go to the saved place, if the prompts are those that the run has drawn from."""
        sampler = self._data.sampler
        why = _other_prompts(sampler, states)
        if not why:
            sampler.seek([(state.epoch, state.position) for state in states])
        elif any(change.key == "rollout.max_new_tokens" for change in changes):
            self._tell(f"rollout.max_new_tokens has changed, so other prompts fit into the model's context: {why}")
            self._tell("prompts are drawn from the beginning")
        else:
            raise DataError(
                "The prompts have changed since the checkpoint.",
                where="data",
                why=why,
                fix="restore the data, or make the source return the same prompts each time; or, to train on the new "
                "prompts, start a new run with resume=PATH and change a key of section data, such as data.options.path",
            )

    def _note_boundary(self, step: int, weights_version: int, metrics: Mapping[str, float]) -> None:
        if not self._able or step == 0:
            return
        sampler = tuple(
            SourceState(epoch=epoch, position=position, prompts=len(table), digest=table.digest)
            for (epoch, position), table in zip(self._data.places, self._data.sampler.tables, strict=True)
        )
        config = self._config.model_dump(mode="json")
        self._boundary = DriverState(
            step=step,
            sampler=sampler,
            weights_version=weights_version,
            config=config,
            beginning=self._run.beginning,
            kl=to_remember(self._config.algorithm, metrics),
        )

    def _due(self, step: int) -> bool:
        if not self._enabled or self._boundary is None or step == self.last:
            return False
        steps, minutes = self._settings.every_steps, self._settings.every_minutes
        if steps is not None and step % steps == 0:
            return True
        return minutes is not None and time.monotonic() - self._saved_at >= 60.0 * minutes

    def _save_boundary(self) -> None:
        """Save the state of the last boundary, and wait until it is on disk."""
        self._complete(wait=True)
        if self._enabled and self._boundary is not None and self._boundary.step != self.last:
            self._save(asynchronous=False)

    def _save_before(self, error: Exception) -> None:
        """Keep what was trained before an error, if the error has left the training engine as it was."""
        if not self._enabled or self._boundary is None or self._trainer.group.ended:
            return
        try:
            self._save_boundary()
        except AnytronError as second:
            self._tell(f"no checkpoint could be saved after the error: {second.what} {second.why}")
        else:
            self._tell(
                f"the checkpoint of step {self.last} holds everything trained before the error: {type(error).__name__}"
            )

    def _rescued(self, lost: LostDirectoryError) -> LostDirectoryError:
        """Save the state in memory into a directory beside a lost run directory; return the error with its name."""
        new_run = "start a new run"
        try:
            if unread := self._run.rescue():
                lost.why += f"\nparts of the record could not be carried over: {'; '.join(unread)}"
            path, boundary = self._run.path, self._boundary
            lost.fix = f"metrics and samples lie in {path}, and nothing else could be saved: {new_run}"
            if self._trainer.group.ended:
                return lost
            self._pending = None  # its files are lost, and to ask for them would end the ranks
            if boundary is not None:
                self._directory, self._best = CheckpointDirectory(path / CHECKPOINTS), None
                self._save(asynchronous=False)
                lost.fix = (
                    f"continue after step {boundary.step}: anytron train {shlex.quote(str(path / 'config.yaml'))}"
                )
                lost.fix += " resume=auto"
            else:  # in the middle of an update, or no engine with checkpoints
                publish_directory(path / MODEL, lambda part: self._trainer.save_hf(str(part)))
                lost.fix = f"the weights lie in {path / MODEL}, metrics and samples beside them: {new_run}"
        except (AnytronError, OSError) as second:
            said = second.headline if isinstance(second, AnytronError) else str(second)
            lost.why += f"\nnot everything in memory could be saved: {said}"
        return lost

    def _save(self, *, asynchronous: bool) -> None:
        self._complete(wait=True)
        self._saved_at = time.monotonic()
        if self._boundary is None or not self._has_room(self._boundary.step):
            return
        path = self._directory.begin(self._boundary.step)
        self._trainer.save_checkpoint(str(path), asynchronous=asynchronous)
        self._pending = self._boundary
        if not asynchronous:
            self._complete(wait=True)

    def _complete(self, *, wait: bool) -> None:
        """Commit the checkpoint that is being written once all of it is on disk."""
        if self._pending is None:
            return
        self._run.require_place()  # a rank that cannot write its files fails, and with it the group
        files = self._trainer.written_files(wait=wait)
        if files is None:
            return
        self._run.sync()
        checkpoint = self._directory.commit(self._pending, files)
        self._pending, self.last = None, checkpoint.step
        self._rotate(checkpoint.step)
        self._tell(f"checkpoint of step {checkpoint.step}: {checkpoint.path}")

    def _save_best(self) -> None:
        """Begin to save the state of the boundary, if it is the best and no save has begun."""
        best, boundary = self._best, self._boundary
        if best is not None and boundary is not None and best.step == boundary.step and self._pending is not boundary:
            self._save(asynchronous=self._settings.asynchronous)

    def _rotate(self, step: int) -> None:
        """Mark the complete checkpoint of a step if it is the best one, and delete those that are not kept any more."""
        if self._best is not None and self._best.step == step:
            self._best.write(self._directory.path)
            self._best = None
        self._directory.prune(self._settings.keep)

    def _has_room(self, step: int) -> bool:
        """Whether the disk has room for a checkpoint as large as the last one; a full disk could damage other files."""
        earlier = self._directory.complete()
        needed = earlier[-1].manifest().size if earlier else 0
        self._directory.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._directory.path).free
        self._no_room = None
        if free < needed:
            self._no_room = ResourceError(
                f"There is no room for the checkpoint of step {step}.",
                where=str(self._directory.path),
                why=f"the last checkpoint takes {needed / 1e9:.3g} GB, but only {free / 1e9:.3g} GB are free",
                fix="free disk space, or lower checkpoint.keep; then continue with resume=auto",
            )
            self._tell(f"warning: {self._no_room.what} {self._no_room.why}")
        return self._no_room is None


def _beats(found: Best, before: Best) -> bool:
    """Whether a validation is better than the previous best, or has another metric and cannot be compared."""
    if (found.metric, found.direction) != (before.metric, before.direction):
        return True
    return is_better(found.value, before.value, found.direction)


def _other_prompts(sampler: Mixture, states: Sequence[SourceState]) -> str:
    """Return how the prompts differ from the prompts of a checkpoint; empty if they do not."""
    were, are = ", ".join(str(state.prompts) for state in states), ", ".join(str(len(one)) for one in sampler.tables)
    if were != are:
        return f"there were {were} prompts and now there are {are}, so the run's place in them is lost"
    others = [
        table.name
        for table, state in zip(sampler.tables, states, strict=True)
        if state.digest and state.digest != table.digest
    ]
    return f"prompts of {', '.join(others)} have other tokens or another order" if others else ""
