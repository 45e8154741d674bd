"""The directory of a run, and where its files are."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from anytron.base.errors import AnytronError, LostDirectoryError
from anytron.base.files import PRIVATE, open_to_append, write_durably
from anytron.config.dump import to_yaml
from anytron.record.tracking.files import Album, JsonlSink, remove_pictures
from anytron.record.tracking.lines import last_record, read_jsonl
from anytron.record.tracking.record import Resume, RunRecord, installed_versions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.record.tracking.claim import ClaimedDirectory
    from anytron.record.tracking.record import Change
    from anytron.task.data.beginning import Beginning
    from anytron.task.environments.protocol import Outcome
    from anytron.task.rewards.sample import Sample
    from anytron.task.rewards.scoring import RewardScores


VALIDATION = "validation.jsonl"
"""Name of the file with the metrics of validations."""
LOGGED_FAILURES = 16
"""Largest number of samples of a step that are written because a reward failed; the same again for environments."""
ERROR_LENGTH = 2000
"""Largest number of characters of an error that are written."""


class RunDirectory:
    """Writes a run's files. A context manager: leaving closes them.

    Args:
        claimed: The run's directory, locked.
        config: The run's configuration.
        record: History of the run.
        after: Continue the existing files of the run after this step; None = start new files.

    Attributes:
        path: The directory; :meth:`rescue` changes it.
    """

    def __init__(
        self, claimed: ClaimedDirectory, config: RunConfig, record: RunRecord, *, after: int | None = None
    ) -> None:
        self.path = claimed.path
        self._claimed: ClaimedDirectory | None = claimed  # None = what was claimed is lost
        self._config = config
        self._log_samples, self._supervised = config.trainer.log_samples, config.supervised
        self._record = record.model_copy(
            update={"failure": None, "early_stop": None, "versions": installed_versions(config)}
        )
        self._record.write(self.path)
        write_durably(self.path / "config.yaml", to_yaml(config), PRIVATE)
        self._metrics = JsonlSink(self.path / "metrics.jsonl", after=after)
        self._samples = JsonlSink(self.path / "samples.jsonl", after=after)
        validation = self.path / VALIDATION
        examines = config.validation is not None or (after is not None and validation.is_file())
        self._validation = JsonlSink(validation, after=after) if examines else None
        if after is not None:
            remove_pictures(self.path, after)

    @classmethod
    def begin(
        cls,
        claimed: ClaimedDirectory,
        config: RunConfig,
        started_from: Path | None = None,
        beginning: Beginning | None = None,
    ) -> RunDirectory:
        """Open the directory for a new run; the files of an earlier run must have been deleted.

        Args:
            claimed: The run's directory, locked.
            config: The run's configuration.
            started_from: The checkpoint of another run that this one begins with; None = no checkpoint.
            beginning: Time at which the run began, and its chat template; None if nothing depends on them.
        """
        origin = None if started_from is None else str(started_from)
        values = config.model_dump(mode="json")
        return cls(claimed, config, RunRecord(config=values, beginning=beginning, started_from=origin))

    @classmethod
    def resume(
        cls,
        claimed: ClaimedDirectory,
        config: RunConfig,
        step: int,
        changes: Sequence[Change],
        beginning: Beginning | None = None,
    ) -> RunDirectory:
        """Open the directory to continue its run; what was recorded after ``step`` is removed.

        Args:
            claimed: The run's directory, locked.
            config: The run's configuration.
            step: Number of completed steps of the checkpoint.
            changes: Changes of the configuration since the last start.
            beginning: Time at which the run began, and its chat template; None if nothing depends on them.
        """
        assert claimed.record is not None, "the caller has found a checkpoint of this run"
        resumes = [*claimed.record.resumes, Resume(step=step, changes=list(changes))]
        values = config.model_dump(mode="json")
        record = claimed.record.model_copy(update={"config": values, "beginning": beginning, "resumes": resumes})
        return cls(claimed, config, record, after=step)

    @property
    def beginning(self) -> Beginning | None:
        """Time at which the run began and the chat template that it began with; a resumed run uses both again."""
        return self._record.beginning

    def write_patches(self, workers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Record what each worker reports about itself, by role and rank."""
        write_durably(self.path / "patches.json", json.dumps(workers, indent=2, default=str) + "\n")

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """Append a step's metrics."""
        self._metrics.write(metrics)

    def write_validation(self, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a validation. The entry also marks the validation as done."""
        assert self._validation is not None, "the run validates"
        self._validation.write(metrics)

    def write_samples(
        self, step: int, samples: Sequence[Sample], rewards: RewardScores | None, validation: str | None = None
    ) -> None:
        """Append ``trainer.log_samples`` samples, spread over the step's prompts, and some for which user code failed.

        Args:
            step: The step.
            samples: All samples of the step.
            rewards: Rewards of the samples; None = the run ends because rewards failed, and every sample is kept.
            validation: Name of the validation set of the samples; None = samples of training.
        """
        count = len(samples) if rewards is None else min(self._log_samples, len(samples))
        chosen = {position * len(samples) // count for position in range(count)}
        errors: dict[int, dict[str, str]] = {}
        for name, failures in ({} if rewards is None else rewards.failures).items():
            for index, failure in failures.items():
                errors.setdefault(index, {})[name] = f"{failure.what} {failure.why}"[:ERROR_LENGTH]
        broken = {
            index: f"{failure.what} {failure.why}"[:ERROR_LENGTH]
            for index, failure in enumerate(sample.environment_failure for sample in samples)
            if failure is not None
        }
        chosen.update(sorted(errors)[:LOGGED_FAILURES], sorted(broken)[:LOGGED_FAILURES])
        album = Album(self.path, step, validation)
        for index in sorted(chosen):
            sample = samples[index]
            reward = None if rewards is None else rewards.total[index].item()
            self._samples.write(
                {
                    "step": step,
                    **({} if validation is None else {"validation": validation}),
                    "prompt_id": sample.prompt_id,
                    "prompt": sample.prompt_text,
                    **({"images": album.add(sample.images)} if sample.images else {}),
                    "response": sample.response_text,
                    "response_tokens": list(sample.response_tokens),
                    **({} if sample.environment is None else _of_turns(sample, sample.environment)),
                    "finished": sample.finished,
                    "reward": None if reward is None or math.isnan(reward) else reward,
                    **({"reward_errors": errors[index]} if index in errors else {}),
                    **({"environment_error": broken[index]} if index in broken else {}),
                }
            )

    def log(self, text: str) -> None:
        """Append a line to the driver's log, with the time."""
        if self.lost() is not None:  # the run ends after the step; at its path may be the directory of another one
            return
        path = self.path / "logs" / "driver.log"
        path.parent.mkdir(exist_ok=True)
        with os.fdopen(open_to_append(path), "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} {text}\n")

    def last_metrics(self) -> dict[str, float]:
        """The metrics of the last step that was recorded; empty if none was."""
        return last_record(self.path / "metrics.jsonl") or {}

    def validations(self) -> list[dict[str, float]]:
        """The metrics of all validations so far, the oldest first."""
        return [] if self._validation is None else list(read_jsonl(self.path / VALIDATION))

    def finished(self, step: int, early_stop: str | None = None) -> None:
        """Record that the trained model of ``step`` has been saved.

        Args:
            step: Number of completed steps.
            early_stop: Why the run ended before its last step; None if it did not.

        Raises:
            LostDirectoryError: The run's directory was removed or replaced.
        """
        self.require_place()
        self._record = self._record.model_copy(update={"finished_step": step, "early_stop": early_stop})
        self._record.write(self.path)

    def plot(self) -> None:
        """Draw ``plots/reward.png`` from ``metrics.jsonl``, or ``plots/loss.png`` in supervised fine-tuning."""
        from anytron.record.tracking.files import plot_loss, plot_reward

        draw, name = (plot_loss, "loss") if self._supervised else (plot_reward, "reward")
        draw(self.path / "metrics.jsonl", self.path / "plots" / f"{name}.png")

    def lost(self) -> LostDirectoryError | None:
        """Return an error if a directory or a file of the run was removed or replaced; None otherwise.

        It costs a few calls of ``stat``.
        """
        if self._claimed is None:
            return None
        if (found := self._claimed.lost()) is not None:
            return found
        for sink in self._sinks():
            if why := sink.lost():
                return LostDirectoryError(
                    "A file of the run was removed or replaced.",
                    where=str(sink.path),
                    why=why,
                    fix="start the run again with resume=auto",
                )
        return None

    def require_place(self) -> None:
        """Check that the directory still exists.

        Raises:
            LostDirectoryError: The directory, or a file in it, was removed or replaced.
        """
        if (found := self.lost()) is not None:
            raise found

    def rescue(self) -> list[str]:
        """Continue in a new directory beside the lost one, with the metrics and samples so far.

        The configuration and ``run.json`` there name the new directory; checkpoints are saved inside of it.

        Returns:
            Which files could not be carried over, and why.

        Raises:
            OSError: The new directory cannot be written.
        """
        beside = next(folder for folder in self.path.parents if folder.is_dir())
        path = beside / f"{self.path.name}.rescued-{time.strftime('%Y%m%d-%H%M%S')}"
        path.mkdir()
        trainer = self._config.trainer.model_copy(update={"output_dir": str(path)})
        checkpoint = self._config.checkpoint.model_copy(update={"path": None})
        self._config = self._config.model_copy(update={"trainer": trainer, "checkpoint": checkpoint})
        self._record = self._record.model_copy(update={"config": self._config.model_dump(mode="json")})
        self._record.write(path)
        write_durably(path / "config.yaml", to_yaml(self._config), PRIVATE)
        self.path, self._claimed = path, None
        failures: list[str] = []
        self._metrics = _taken(self._metrics, path, failures)
        self._samples = _taken(self._samples, path, failures)
        self._validation = None if self._validation is None else _taken(self._validation, path, failures)
        return failures

    def sync(self) -> None:
        """Wait until metrics and samples are on disk, so that no power cut makes them older than a checkpoint."""
        for sink in self._sinks():
            sink.sync()

    def close(self) -> None:
        """Close the files."""
        for sink in self._sinks():
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        lost = error is not None and self.lost() is not None
        self.close()
        if error is not None and not lost:  # at its path may be the directory of another run
            with contextlib.suppress(OSError):  # the disk may be what failed
                self._failed(error)

    def _sinks(self) -> list[JsonlSink]:
        return [sink for sink in (self._metrics, self._samples, self._validation) if sink is not None]

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, AnytronError):
            said = " ".join(filter(None, [error.headline, error.why]))
        else:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._record = self._record.model_copy(
            update={"failure": said[:ERROR_LENGTH].encode(errors="backslashreplace").decode()}
        )
        self._record.write(self.path)


def _taken(sink: JsonlSink, directory: Path, failures: list[str]) -> JsonlSink:
    """Copy a sink's file to another directory and continue it there; unreadable files are added to ``failures``."""
    taken = JsonlSink(directory / sink.path.name)
    try:
        taken.take(sink)
    except OSError as error:  # the weights are worth more than the record: they are saved all the same
        failures.append(f"{sink.path.name}: {error}")
    sink.close()
    return taken


def _of_turns(sample: Sample, outcome: Outcome) -> dict[str, Any]:
    others = [_of_tokens(other) for other in sample.others]
    return {
        **_mask(sample),
        "turns": outcome.turns,
        "environment_reward": outcome.reward,
        **({"others": others} if others else {}),
    }


def _of_tokens(other: Sample) -> dict[str, Any]:
    """Return what is recorded of a further conversation of an agent."""
    tokens = list(other.response_tokens)
    said = {"prompt": other.prompt_text, "response": other.response_text, "response_tokens": tokens}
    return {**said, **_mask(other)}


def _mask(sample: Sample) -> dict[str, list[int]]:
    return {"response_mask": [int(own) for own in sample.response_mask or ()]}
