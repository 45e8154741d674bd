"""What the modules of a training engine compute for each token, so that two ways to compute it can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from anytron.workers.engines.training_engine import TrainingEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.sequences.batch import RaggedBatch

Way = Literal["training", "generation"]
OUTPUT, LOG_PROB = "output", "log-prob"
"""Kind of a module's first output, and the name under which a trace holds the tokens' log-probs, whose kind is the
same."""


@dataclass(frozen=True)
class TracedTensor:
    """What a module took or gave for each of T tokens.

    Attributes:
        name: The module, by its dotted name; or :data:`LOG_PROB`.
        kind: Which tensor: ``input`` or :data:`OUTPUT`, with a number from the second on, and with the call if the
            module is called several times in a pass.
        stage: Place of the model's part in the order of computation.
        width: Number of entries of a row.
        digests: int64 ``[T]``, equal for two tokens if their rows are equal to the bit.
        computed: bool ``[T]``, True = this rank computed the token's row in this pass.
    """

    name: str
    kind: str
    stage: int
    width: int
    digests: Tensor
    computed: Tensor

    @property
    def key(self) -> tuple[str, str]:
        """Name and kind, which identify the tensor in several traces."""
        return self.name, self.kind


@dataclass(frozen=True)
class Trace:
    """What the modules of a rank computed in a pass over T tokens, in the order of computation.

    Attributes:
        tensors: Inputs and outputs of modules that have a row for each token.
        rows: float32 ``[T, W]``, the rows of the tensor that the caller asked for, 0 where they were not computed; None
            = the rank has no such tensor.
    """

    tensors: tuple[TracedTensor, ...]
    rows: Tensor | None


class TraceableEngine(TrainingEngine, Protocol):
    """A training engine whose modules' results can be compared token by token: capability ``tracing``.

    ``anytron compare`` needs it; training does not.
    """

    def trace(self, micro_batches: Sequence[RaggedBatch], way: Way, rows_of: tuple[str, str] | None = None) -> Trace:
        """Compute the log-probs of response tokens, without gradients, and trace every module. A collective.

        Args:
            micro_batches: The same on every rank. Tokens are numbered through all of them.
            way: ``training`` = the passes that score micro-batches; ``generation`` = the passes of an engine that
                generates itself (:class:`GeneratingEngine`): each token with a cache of the tokens before it, all
                sequences of one micro-batch beside each other.
            rows_of: Key of the tensor whose rows are returned (:attr:`TracedTensor.key`); None = none.
        """
