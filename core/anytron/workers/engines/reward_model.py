"""The protocol of engines that hold a reward model: ranks of their own beside those of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import Topology


class RewardModelEngine(Protocol):
    """One rank of a reward model, ``EngineInfo.reward_model``. All ranks receive the same calls in the same order.

    It is built with :attr:`anytron.config.schema.RunConfig.of_reward_model`.
    """

    def topology(self) -> Topology:
        """Where this rank stands among those of the reward model."""

    def score(self, micro_batches: Sequence[RaggedBatch]) -> list[Tensor] | None:
        """Say how good sequences are, as ``AutoModelForSequenceClassification`` of transformers does.

        The number is that of the head at the last token that is not the padding token of the model's config.

        Returns:
            For each micro-batch float32 ``[B]`` on reporting ranks (host tensors), None elsewhere.
        """

    def describe(self) -> Mapping[str, Any]:
        """Facts for the run's records, as :meth:`anytron.workers.engines.training_engine.TrainingEngine.describe`."""

    def close(self) -> None:
        """Release what the engine holds; another may be built in this process afterwards."""
