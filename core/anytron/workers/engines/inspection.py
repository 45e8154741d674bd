"""What an engine says when it is asked where a number stopped being finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class NonFinite:
    """A number that is NaN or infinite, and was the first to be so in a pass over a model.

    Attributes:
        place: Module or parameter, by its dotted name; or ``loss``.
        what: What of it: its output, the loss, a gradient.
        value: ``nan``, ``inf`` or ``-inf``.
        count: Numbers of the same tensor that are not finite.
        size: Numbers of that tensor.
        micro_batch: Number of the micro-batch, from 0.
        sequence: Position of the sequence in it; None if the tensor has no place for each token.
        token: Position of the token in its sequence.
    """

    place: str
    what: Literal["output", "loss", "gradient of its input", "gradient of its output", "gradient"]
    value: str
    count: int
    size: int
    micro_batch: int
    sequence: int | None = None
    token: int | None = None


@dataclass(frozen=True)
class Inspection:
    """What :meth:`anytron.workers.engines.training_engine.InspectableEngine.inspect_update` found.

    Attributes:
        weights: Names of parameters that hold numbers that are not finite, before the pass.
        first: The first number in the pass that is not finite; None if all are.
        metrics: The update's metrics.
    """

    weights: tuple[str, ...]
    first: NonFinite | None
    metrics: Mapping[str, float]
