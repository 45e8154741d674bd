"""Basalt's log-probs and entropies: from all logits at once, where the vocabulary is on one rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from anytron.kernels import LogProbKernel, LogProbSpec


def make_log_probs(spec: LogProbSpec) -> LogProbKernel | None:
    """Make the kernel for a vocabulary; None if ranks share the vocabulary: then Anytron's default kernel is used."""
    return partial(log_probs, spec.vocab_size) if spec.tensor_parallel == 1 else None


def log_probs(
    entries: int, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, float32 ``[N]``; rows of ``weight`` after the first ``entries`` are padding."""
    assert group is None or group.size() == 1
    logits = (hidden @ weight[:entries].T).float() / temperature
    every = logits.log_softmax(-1)
    chosen = every.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    real = labels >= 0
    return torch.where(real, chosen, 0.0), torch.where(real, entropy, 0.0)
