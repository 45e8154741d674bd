"""Which checkpoint is the best one so far: ``best``, a small file beside the checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from anytron.base.errors import CheckpointError
from anytron.base.files import write_durably
from anytron.config.json_files import read_object

if TYPE_CHECKING:
    from pathlib import Path

BEST = "best"


class Best(BaseModel):
    """The validation that found the best policy so far, whose checkpoint is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=1)
    """Training steps behind it."""
    metric: str
    """What was compared."""
    direction: Literal["max", "min"]
    """Whether high or low is good."""
    value: float
    """The metric's value."""

    def write(self, directory: Path) -> None:
        """Write the file, which is seen whole or as it was before."""
        write_durably(directory / BEST, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Best | None:
        """Read the file; None if there is none.

        Raises:
            CheckpointError: It is damaged.
        """
        path = directory / BEST
        try:
            return cls.model_validate(read_object(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                "The file that names the best checkpoint cannot be read.",
                where=str(path),
                why=str(error),
                fix="delete it: the checkpoints themselves are not affected",
            ) from error
