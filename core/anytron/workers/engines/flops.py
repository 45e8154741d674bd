"""Floating-point operations that training needs, and how much of what devices can do that is (MFU).

A pass forward and backward through a matrix takes 6 operations for each of its numbers and each token: a multiplication
and an addition in the forward pass, twice as many in the backward pass, for the gradient of the input and that of the
matrix (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B; Narayanan et al., arXiv:2104.04473, appendix). Attention
takes 12 L H Q for each pair of a query and a key (the same appendix B), and a causal model has only the pairs of a
token with itself and those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig


@dataclass(frozen=True)
class AttentionLayers:
    """Layers of one kind of attention.

    Attributes:
        width: Of all of them together, heads times the size of a head, averaged over that of keys and that of values.
        window: How many tokens a token sees, itself included; None = all before it.
    """

    width: float
    window: int | None = None

    def pairs(self, length: int) -> float:
        """Count the pairs of tokens of a sequence of which one sees the other; two halves make a whole (n^2 / 2)."""
        if self.window is None or self.window >= length:
            return length**2 / 2
        return self.window * length - self.window**2 / 2


@dataclass(frozen=True)
class ModelFlops:
    """What a model computes for a token.

    Attributes:
        weights: Numbers of matrices that multiply a token's hidden state: those of the experts that it goes to, not of
            all; the output layer, not the embedding, which is looked up.
        attention: Its layers with attention. Linear attention is in none: its state takes little beside its matrices.
        trained: Its own weights are trained; False = adapters are (LoRA), and no gradient of the matrices is computed:
            4 operations instead of 6. What the adapters themselves take is left out.
    """

    weights: float
    attention: tuple[AttentionLayers, ...]
    trained: bool = True

    def update(self, lengths: Sequence[int]) -> float:
        """Count the operations of an update, forward and backward, on sequences each computed once by itself.

        What an implementation computes besides - recomputed activations, padding - is not needed and does not count,
        and neither does it save operations to share a prompt among its samples.

        Args:
            lengths: Tokens of each sequence, prompt included.
        """
        pairs = sum(layers.width * layers.pairs(length) for layers in self.attention for length in lengths)
        return (6 if self.trained else 4) * self.weights * sum(lengths) + 12 * pairs


class CountsFlops(Protocol):
    """``EngineInfo.flops`` of a training engine."""

    def __call__(self, run: RunConfig) -> tuple[ModelFlops, ModelFlops | None]:
        """Describe the policy and the critic, if there is one, from the configuration alone.

        Raises:
            ConfigError: The sizes of the model are not known.
        """
