"""Fix the gradients of Gated DeltaNet's norms with tensor parallelism.

A rank computes its heads over whole sequences: with sequence parallelism mcore-bridge gathers them before the
layer's first norm. Megatron then takes the gradients of two weights that all ranks hold for what they are not:
complete ones for partial, or partial ones for complete.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def sum_partial_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GatedDeltaNet.__init__``.

    The norm inside the first projection sees whole sequences, so its gradient is complete on every rank. It is
    marked ``sequence_parallel``, and Megatron would sum it over ranks: tp times too large. The norm of the heads'
    output sees this rank's heads only. Megatron sums its gradient with sequence parallelism; without it each rank
    keeps its part, which the hook here sums.
    """

    @functools.wraps(original)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if self.tp_size == 1:
            return
        if config.sequence_parallel:
            first = getattr(self, "in_proj", None)  # split projections have their norm outside
            for name in ("layer_norm_weight", "layer_norm_bias"):
                if (parameter := getattr(first, name, None)) is not None:
                    parameter.sequence_parallel = False
            return
        group = self.pg_collection.tp

        def summed(grad: Tensor) -> Tensor:
            total = grad.clone()
            dist.all_reduce(total, group=group)
            return total

        for parameter in self.out_norm.parameters():
            parameter.register_hook(summed)

    return construct
