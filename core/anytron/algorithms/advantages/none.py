"""Learn nothing from rewards: what teaches is a teacher (:mod:`anytron.algorithms.distillation`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.algorithms.contract import Advantages

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


def no_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Give every token the advantage 0 (``algorithm.advantage=none``)."""
    del rewards, algorithm
    return Advantages(torch.zeros(batch.num_tokens))
