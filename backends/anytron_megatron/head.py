"""In the place of logits: the two numbers per token that reinforcement learning wants of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from anytron.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from anytron.hooks.types import LogProbKernel


class TokenScoreHead:
    """Stand in for the forward of a model's output layer, so that whole logits never exist.

    Megatron's GPT ends with ``logits, _ = output_layer(hidden, weight=...)`` and transposes what it
    got to batch-first; it does not look inside. So the output layer answers with ``[S, B, 2]``:
    log-prob of the label and entropy.

    Args:
        layer: The model's ``ColumnParallelLinear`` output layer; keeps its parameters and its place.
        kernel: Computes log-probs and entropies from hidden states.
    """

    def __init__(self, layer: torch.nn.Module, kernel: LogProbKernel) -> None:
        self._layer = layer
        self._kernel = kernel
        self._labels: Tensor | None = None
        self._temperature = 1.0
        layer.forward = self.score

    @contextlib.contextmanager
    def scoring(self, labels: Tensor, temperature: float) -> Iterator[None]:
        """Set what the forward passes within score.

        Args:
            labels: int64 ``[B, S]``; negative = ignored.
            temperature: Logits are divided by it.
        """
        self._labels, self._temperature = labels, temperature
        try:
            yield
        finally:
            self._labels = None

    def score(self, hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """Answer in the shape of an output layer.

        Args:
            hidden: ``[S, B, H]``, or ``[S / tp, B, H]`` with sequence parallelism.
            weight: The tied embedding's weight, ``[V / tp, H]``; None = the layer's own.
            unused: Further arguments of the output layer, which concern logits.

        Returns:
            float32 ``[S, B, 2]`` and the bias that output layers do not have.
        """
        del unused
        if self._labels is None:
            raise EngineError("The model was run outside of a scoring pass.", where="TokenScoreHead")
        group = self._layer.tp_group
        if self._layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        labels = self._labels.t()
        if hidden.shape[:2] != labels.shape:
            raise EngineError(
                "Hidden states and labels differ in shape.",
                where="TokenScoreHead",
                why=f"hidden states {tuple(hidden.shape[:2])}, labels {tuple(labels.shape)} (sequence, batch)",
            )
        log_probs, entropy = self._kernel(
            hidden.flatten(0, 1),
            self._layer.weight if weight is None else weight,
            labels.reshape(-1),
            self._temperature,
            group,
        )
        return torch.stack([log_probs, entropy], dim=-1).view(*labels.shape, 2), None
