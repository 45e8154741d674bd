"""What a sink of metrics is."""

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
        directory: A directory of the sink's own in the run's, ``tracking/NAME``; it exists, and outlives a restart.
        config: The configuration as JSON values, without its secrets.
        after: The run continues after this step, and will write later ones again that it has written before; None for
            a new run.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    after: int | None

    def remembered(self, file: str, new: str) -> str:
        """Read a short text from a file of the sink's directory; write ``new`` into it first if there is none.

        Services know a run by an id: kept like this, a run that continues is the same run there.
        """
        path = self.directory / file
        if not path.is_file():
            path.write_text(new, encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()


class MetricSink(abc.ABC):
    """Takes the metrics of a run to where people look at them.

    One is made for each process that drives a run. All of its methods, the constructor included, are called on one
    thread that it has for itself: they may wait for a network, and what they raise does not stop the run. The module of
    a sink is light to import; the library that it needs is imported by the constructor.

    Args:
        run: The run.
        options: An instance of ``options_model``; None without one.

    Attributes:
        packages: Import packages that it needs; a run that lacks one is refused.
        install: The command that installs them.
        options_model: A pydantic model of the sink's ``options`` (``extra="forbid"``); None = the sink has no options.
        place: Where people find the metrics, for example an address; set by the constructor. Empty = its directory.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = ""
    options_model: ClassVar[type[BaseModel] | None] = None
    place: str = ""

    @abc.abstractmethod
    def __init__(self, run: SinkRun, options: Any) -> None: ...

    @abc.abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step.

        Args:
            step: Counted from 1.
            metrics: By their names in ``metrics.jsonl``, ``step`` included, but for characters that cannot be printed,
                which are ``_``, and for what is beyond 250 characters. Values are floats, and may be NaN or infinite.
        """

    def write_validation(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: B027 - optional to override
        """Take the numbers of a validation, as ``validation.jsonl`` has them; otherwise as :meth:`write`.

        Args:
            step: Completed steps of the evaluated policy, 0 or more; the metrics of this step were written before.
            metrics: By their names, ``step`` included.
        """

    def close(self) -> None:  # noqa: B027 - optional to override
        """Write everything that is still buffered; called once, after the last step or when the run ends otherwise."""
