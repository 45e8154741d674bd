"""The interface of a sink of metrics."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anytron.base.functions import Called, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pydantic import BaseModel

_METRICS = "metrics is a mapping of names to floats"
MADE = Called("A sink's class", ("run", "options"), "run is a SinkRun; options is an object of options_model, or None")
WRITE = Called("A sink's method write", ("step", "metrics"), f"step is an int; {_METRICS}", method="write")
WRITE_VALIDATION = Called(
    "A sink's method write_validation", WRITE.takes, WRITE.given, method="write_validation", optional=True
)
CLOSE = Called("A sink's method close", method="close", optional=True)
SINK = Kind("tracking.sinks[].sink", MADE, (WRITE, WRITE_VALIDATION, CLOSE))


@dataclass(frozen=True)
class SinkRun:
    """The run, as its sinks know it.

    Attributes:
        name: Name of the run's directory.
        directory: Directory for the sink's files in the run's directory, ``tracking/NAME``; it exists, and is kept when
            the run is resumed.
        config: The configuration as JSON values, without its secrets.
        after: The step after which a resumed run continues; later steps may be written a second time. None for a new
            run.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    after: int | None

    def remembered(self, file: str, new: str) -> str:
        """Read a short text from a file in the sink's directory; if there is no such file, write ``new`` into it first.

        Use it for the id by which a service identifies the run: with the same id, a resumed run continues the same run
        at the service.
        """
        path = self.directory / file
        if not path.is_file():
            path.write_text(new, encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()


class MetricSink(abc.ABC):
    """Sends the metrics of a run to a place where people view them.

    Each process that drives a run makes one instance. All of its methods, the constructor included, are called on a
    separate thread: they may wait for a network, and an exception does not stop the run. The module of a sink should be
    light to import: the constructor imports the library that the sink needs.

    Args:
        run: The run.
        options: An instance of ``options_model``; None if there is no such model.

    Attributes:
        packages: Import packages that the sink needs; a run is refused if one is not installed.
        install: The command that installs these packages.
        options_model: A pydantic model of the sink's ``options`` (``extra="forbid"``); None = the sink has no options.
        place: Where people find the metrics, for example a URL; set by the constructor. Empty = the sink's directory.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = ""
    options_model: ClassVar[type[BaseModel] | None] = None
    place: str = ""

    @abc.abstractmethod
    def __init__(self, run: SinkRun, options: Any) -> None: ...

    @abc.abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step.

        Args:
            step: Number of the step, counted from 1.
            metrics: Values by name as in ``metrics.jsonl``, ``step`` included. In names, characters that cannot be
                printed are replaced by ``_``, and all after 250 characters is cut off. Values are floats, and may be
                NaN or infinite.
        """

    def write_validation(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: B027 - optional to override
        """Write the metrics of a validation, as in ``validation.jsonl``. By default they are ignored.

        Args:
            step: Completed steps of the evaluated policy, 0 or more; the metrics of this step were written earlier.
            metrics: Values by name, ``step`` included, as for :meth:`write`.
        """

    def close(self) -> None:  # noqa: B027 - optional to override
        """Write everything that is still buffered. Called once, when the run ends for any reason."""
