"""In the place of logits: the two numbers per token that reinforcement learning wants of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from anytron.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from anytron.kernels.contract import LogProbKernel


class TokenScoreHead:
    """Stand in for the forward of a model's output layer, so that whole logits never exist.

    Megatron's GPT ends with ``logits, _ = output_layer(hidden, weight=...)`` and transposes what it
    got to batch-first; it does not look inside. So the output layer answers with ``[S, B, 2]``:
    log-prob of the label and entropy, and behind them what multi-token prediction has added.

    Args:
        layer: The model's ``ColumnParallelLinear`` output layer; keeps its parameters and its place.
        kernel: Computes log-probs and entropies from hidden states.
    """

    def __init__(self, layer: torch.nn.Module, kernel: LogProbKernel) -> None:
        self._layer = layer
        self._kernel = kernel
        self._labels: Tensor | None = None
        self._temperature = 1.0
        self._following: Callable[[int], Tensor] | None = None
        self._added: list[Tensor] = []
        self._whole = False
        layer.forward = self.score

    @contextlib.contextmanager
    def scoring(self, labels: Tensor, temperature: float, following: Callable[[int], Tensor]) -> Iterator[None]:
        """Set what the forward passes within score.

        Args:
            labels: int64 ``[B, S]``; negative = ignored.
            temperature: Logits are divided by it.
            following: Gives the tokens that stand so many places after each position, as ``labels``.
        """
        self._labels, self._temperature, self._following, self._added = labels, temperature, following, []
        try:
            yield
        finally:
            self._labels, self._following, self._added = None, None, []

    def following(self, ahead: int) -> Tensor:
        """Tokens that stand ``ahead`` places after each position of this pass: int64 ``[B, S]``, negative = none."""
        if self._following is None:
            raise EngineError("The model was run outside of a scoring pass.", where="TokenScoreHead")
        return self._following(ahead)

    @contextlib.contextmanager
    def answering_logits(self) -> Iterator[None]:
        """Let the forward passes within answer with whole logits, ``[S, B, padded V]``, in place of scores."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def score(self, hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """Answer in the shape of an output layer.

        Args:
            hidden: ``[S, B, H]``, or ``[S / tp, B, H]`` with sequence parallelism.
            weight: The tied embedding's weight, ``[V / tp, H]``; None = the layer's own.
            unused: Further arguments of the output layer, which concern logits.

        Returns:
            float32 ``[S, B, 2 + number of additions]``, or whole logits within :meth:`answering_logits`; and
            the bias that output layers do not have.
        """
        del unused
        if self._labels is None:
            raise EngineError("The model was run outside of a scoring pass.", where="TokenScoreHead")
        weight = self._layer.weight if weight is None else weight
        if self._whole:
            shard = torch.nn.functional.linear(self._on_every_rank(hidden), weight)
            return gather_from_tensor_model_parallel_region(shard), None
        log_probs, entropy = self._evaluate(hidden, self._labels, weight)
        return torch.stack([log_probs, entropy, *self._added], dim=-1), None

    def add(self, hidden: Tensor, labels: Tensor, weight: Tensor) -> None:
        """Evaluate other labels by other hidden states, before the forward pass reaches the output layer.

        Args:
            hidden: As in :meth:`score`.
            labels: int64 ``[B, S]``; negative = ignored.
            weight: ``[V / tp, H]``.
        """
        self._added.append(self._evaluate(hidden, labels, weight)[0])

    def _evaluate(self, hidden: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of labels and entropies, float32 ``[S, B]``."""
        hidden = self._on_every_rank(hidden)
        labels = labels.t()
        if hidden.shape[:2] != labels.shape:
            raise EngineError(
                "Hidden states and labels differ in shape.",
                where="TokenScoreHead",
                why=f"hidden states {tuple(hidden.shape[:2])}, labels {tuple(labels.shape)} (sequence, batch)",
            )
        group = parallel_state.get_tensor_model_parallel_group()
        log_probs, entropy = self._kernel(hidden.flatten(0, 1), weight, labels.reshape(-1), self._temperature, group)
        return log_probs.view(labels.shape), entropy.view(labels.shape)

    def _on_every_rank(self, hidden: Tensor) -> Tensor:
        """The hidden states of all positions, ``[S, B, H]``; their gradient is summed over tensor-parallel ranks."""
        if self._layer.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(hidden)
