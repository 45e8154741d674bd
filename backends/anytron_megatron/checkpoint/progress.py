"""An engine's progress (numbers of updates and steps) and parallel sizes, saved as JSON beside the tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from anytron.config.json_files import read_object
from anytron_megatron.checkpoint.unpickling import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROGRESS = "progress.json"
VERSION = 1


@dataclass(frozen=True)
class ModelProgress:
    """The progress of one model.

    Attributes:
        updates: Number of completed updates.
        schedule_steps: Position in the learning-rate schedule; the configuration defines the schedule.
        optimizer_steps: Steps that the optimizer counts, for bias correction.
    """

    updates: int
    schedule_steps: int
    optimizer_steps: int


@dataclass(frozen=True)
class Progress:
    """The part of a checkpoint that is not tensors.

    Attributes:
        layout: The parallel sizes and the type of device of the run that saved the checkpoint. Its random states can be
            restored only if these are the same.
        models: Progress of each model, by role.
    """

    layout: Mapping[str, Any]
    models: Mapping[str, ModelProgress]

    def to_json(self) -> bytes:
        """Write the progress as JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode()

    @classmethod
    def read(cls, directory: Path) -> Progress:
        """Read the progress from a checkpoint's directory.

        Raises:
            EngineError: The file is missing or damaged, or has the format of another version.
        """
        file = directory / PROGRESS
        try:
            content = read_object(file)
            if content["version"] != VERSION:
                raise refusal(file, f"its format is version {content['version']}, but this Anytron reads {VERSION}")
            models = {role: ModelProgress(**model) for role, model in content["models"].items()}
            if not all(type(count) is int for model in models.values() for count in asdict(model).values()):
                raise refusal(file, "its counters are not integers")
            return cls(dict(content["layout"]), models)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise refusal(file, f"{type(error).__name__}: {error}") from error
