"""What the driver itself has to remember: all else follows from the configuration or lies with the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from anytron.base.errors import CheckpointError
from anytron.base.files import PRIVATE, write_durably
from anytron.config.json_files import WITH_CONFIGURATION, read_object
from anytron.task.data.beginning import Beginning  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from pathlib import Path

DRIVER = "driver.json"


class SourceState(BaseModel):
    """Where in the prompts of one source a run is."""

    model_config = ConfigDict(frozen=True)

    epoch: int = Field(ge=0)
    """Epochs behind it."""
    position: int = Field(ge=0)
    """Prompts drawn in this epoch."""
    prompts: int = Field(ge=1)
    """Prompts of an epoch: with another number of them, the place means nothing."""
    digest: str = ""
    """Of their tokens; with another one they are others. Empty in checkpoints from before there was one."""


class DriverState(BaseModel):
    """The driver after a step. Seeds need no record: they follow from ``trainer.seed`` and the step."""

    model_config = ConfigDict(frozen=True)

    step: int = Field(ge=1)
    """Training steps behind it."""
    sampler: tuple[SourceState, ...]
    """Where the next step begins in each source of prompts; together, where in their mix."""
    weights_version: int = Field(ge=0)
    """Optimizer updates behind the weights that the last responses were sampled from."""
    config: dict[str, Any]
    """The run's configuration."""
    beginning: Beginning | None = None
    """The moment in which the run began, and its chat template; null in older checkpoints."""
    kl: dict[str, float] = Field(default_factory=dict)
    """``kl/coefficient`` and ``policy/kl`` of the step, if the coefficient adapts; empty in older checkpoints."""

    @field_validator("sampler", mode="before")
    @classmethod
    def _of_one_source(cls, given: Any) -> Any:
        """Before there were mixes, a checkpoint had the state of the one source."""
        return (given,) if isinstance(given, dict) else given

    def write(self, directory: Path) -> None:
        """Write the driver's file of a checkpoint; nobody else may read it, because configurations may hold secrets."""
        write_durably(directory / DRIVER, self.model_dump_json(indent=1) + "\n", PRIVATE)

    @classmethod
    def read(cls, directory: Path) -> DriverState:
        """Read the driver's file of a checkpoint.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        path = directory / DRIVER
        try:
            return cls.model_validate(read_object(path, deepest=WITH_CONFIGURATION))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                "The driver's state in the checkpoint cannot be read.", where=str(path), why=str(error)
            ) from error
