"""Gradients of the norms of Gated DeltaNet with tensor parallelism.

A rank computes its heads over whole sequences: with sequence parallelism mcore-bridge gathers them before
the layer's first norm and projects as if there were none. Two weights that all ranks hold then get gradients
of another kind than what Megatron takes them for.
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

    The norm inside the first projection sees whole sequences, and its gradient is complete on every rank;
    as it is marked ``sequence_parallel``, Megatron would add the ranks' up, tp times what it is. The norm of
    the heads' output sees this rank's heads only; Megatron adds its gradients up with sequence parallelism,
    and without it leaves each rank with its part.
    """

    @functools.wraps(original)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if self.tp_size == 1:
            return
        if config.sequence_parallel:
            first = getattr(self, "in_proj", None)  # projections that are split have their norm outside
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
