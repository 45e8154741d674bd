"""The linear layer, whole or split over tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from anytron_megatron.portable_te.pytorch import collectives
from anytron_megatron.portable_te.pytorch.module.base import InitMethod, TransformerEngineBaseModule, default_init
from anytron_megatron.portable_te.refusals import refuse_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup


class Linear(TransformerEngineBaseModule):
    """``y = x W^T + b``.

    Accepted without effect, because they change no result: ``fuse_wgrad_accumulation`` (Megatron's
    gradient buffers add ``param.grad`` themselves if the layer did not) and ``ub_name`` (names a
    buffer of the overlap that is refused). Every other setting that asks for something is refused.

    Args:
        in_features: Input size over all ranks.
        out_features: Output size over all ranks.
        sequence_parallel: Inputs (column) or outputs (row) are split along their first dimension.
        get_rng_state_tracker: Gives the tracker in whose state weights are initialised.
        rng_tracker_name: Which of its states; None = the tracker's default.
        init_method: Fills the weight in place.
        return_bias: Return the bias instead of adding it.
        parallel_mode: ``column`` splits the outputs, ``row`` the inputs, None nothing.

    Raises:
        EngineError: A setting is not supported.
    """

    weight: torch.nn.Parameter
    bias: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        ub_name: str | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_settings(type(self).__name__, unsupported)
        del fuse_wgrad_accumulation
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            parallel_mode=parallel_mode,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
        )
        self.ub_name = ub_name
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self._add_parameter(
            "weight",
            (self.out_features, self.in_features),
            init_method or default_init,
            partition_dim=1 if parallel_mode == "row" else 0,
            dtype=params_dtype,
            device=device,
        )
        if bias:
            partition_dim = None if parallel_mode == "row" else 0
            self._add_parameter(
                "bias",
                (self.out_features,),
                torch.nn.init.zeros_,
                partition_dim=partition_dim,
                dtype=params_dtype,
                device=device,
            )
            if parallel_mode == "row":
                vars(self.bias)["sequence_parallel"] = self.sequence_parallel
        else:
            self.bias = torch.Tensor()  # as Transformer Engine; Megatron reads its length

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Multiply this rank's ``[S, ..., in_features]``: ``[S', ..., out_features]``, and the bias if ``return_bias``.

        ``is_first_microbatch`` is when Transformer Engine converts weights to FP8; there is nothing to do here.
        """
        del is_first_microbatch
        output = self._multiply(x)
        return (output, self.bias) if self.return_bias else output

    def _multiply(self, x: Tensor) -> Tensor:
        bias = self.bias if self.apply_bias else None
        if self.tp_size == 1 or self.parallel_mode is None:
            return functional.linear(x, self.weight, bias)
        if self.parallel_mode == "column":
            enter = collectives.gather_first if self.sequence_parallel else collectives.replicate
            return functional.linear(enter(x, self.tp_group), self.weight, bias)
        leave = collectives.reduce_scatter_first if self.sequence_parallel else collectives.reduce
        output = leave(functional.linear(x, self.weight), self.tp_group)
        return output if bias is None else output + bias
