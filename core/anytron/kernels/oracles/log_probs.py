"""Log-probabilities and entropies of tokens from their definition, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def reference_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, entries: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Make all logits of the vocabulary, and give the label's log-prob and the entropy of each token.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, V at least ``entries``: what is left over is padding.
        labels: int64 ``[N]``; negative = ignored.
        entries: Of the vocabulary.
        temperature: Logits are divided by it.

    Returns:
        Log-probs and entropies, float64 ``[N]``, differentiable; 0 where the label is ignored.
    """
    every = (hidden.double() @ weight[:entries].double().T / temperature).log_softmax(-1)
    real = (labels >= 0).double()
    chosen = every.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return chosen * real, -(every.exp() * every).sum(-1) * real
