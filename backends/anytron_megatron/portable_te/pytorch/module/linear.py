"""The linear layer, whole or split over tensor-parallel ranks, and one linear layer per expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.kernels.contract import KernelName
from anytron_megatron.portable_te.binding import kernels
from anytron_megatron.portable_te.pytorch import collectives
from anytron_megatron.portable_te.pytorch.module.base import (
    InitMethod,
    TransformerEngineBaseModule,
    default_init,
    tensor_parallel_size,
)
from anytron_megatron.portable_te.refusals import refuse, refuse_settings

if TYPE_CHECKING:
    from collections.abc import Sequence


class Linear(TransformerEngineBaseModule):
    """``y = x W^T + b``; sizes are over all ranks, and ``init_method`` fills the weight in place."""

    weight: torch.nn.Parameter
    bias: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: InitMethod | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        device: Any = None,
        **shared: Any,
    ) -> None:
        super().__init__(bias=bias, parallel_mode=parallel_mode, tp_size=tp_size, **shared)
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self._add_parameter(
            "weight",
            (self.out_features, self.in_features),
            init_method or default_init,
            partition_dim=1 if parallel_mode == "row" else 0,
            dtype=params_dtype,
            device=device,
        )
        if bias:
            self._add_parameter(
                "bias",
                (self.out_features,),
                torch.nn.init.zeros_,
                partition_dim=None if parallel_mode == "row" else 0,
                dtype=params_dtype,
                device=device,
            )
            if parallel_mode == "row":
                vars(self.bias)["sequence_parallel"] = self.sequence_parallel
        else:
            self.bias = torch.Tensor()  # as Transformer Engine; Megatron reads its length
        self._linear = kernels().fused(KernelName.LINEAR, params_dtype)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **unsupported: Any) -> Any:
        """Apply the layer to this rank's input, ``[S, ..., in_features]``.

        ``is_first_microbatch``, at which Transformer Engine converts weights to FP8, has no effect.

        Returns:
            ``[S', ..., out_features]`` of this rank; with ``return_bias`` also the bias, which is then not added. S' is
            S; with sequence parallelism, a column-parallel layer multiplies S by the tensor-parallel size, and a
            row-parallel layer divides S by it.

        Raises:
            EngineError: A setting is not supported.
        """
        refuse_settings("Linear.forward", unsupported)
        del is_first_microbatch
        output = self._multiply(inp)
        return (output, self.bias) if self.return_bias else output

    def _multiply(self, x: Tensor) -> Tensor:
        bias = self.bias if self.apply_bias else None
        if self.tp_size == 1 or self.parallel_mode is None:
            whole: Tensor = self._linear(x, self.weight, bias)
            return whole
        if self.parallel_mode == "column":
            enter = collectives.gather_first if self.sequence_parallel else collectives.replicate
            columns: Tensor = self._linear(enter(x, self.tp_group), self.weight, bias)
            return columns
        leave = collectives.reduce_scatter_first if self.sequence_parallel else collectives.reduce
        output = leave(self._linear(x, self.weight, None), self.tp_group)
        return output if bias is None else output + bias


class GroupedLinear(TransformerEngineBaseModule):
    """``num_gemms`` linear layers with parameters ``weight0``, ``bias0``, ``weight1``, ...

    Megatron's token dispatcher communicates; the layer itself does not.

    Raises:
        EngineError: ``parallel_mode`` asks for a split of the layer over several ranks, or a setting is not supported.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: InitMethod | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        device: Any = None,
        **shared: Any,
    ) -> None:
        if parallel_mode is not None and tensor_parallel_size(shared.get("tp_group"), tp_size) > 1:
            fix = "pass parallel_mode=None, as Megatron's TEGroupedLinear does: its token dispatcher communicates"
            refuse("GroupedLinear", "tensor parallelism in GroupedLinear", fix)
        super().__init__(bias=bias, parallel_mode=parallel_mode, tp_size=tp_size, **shared)
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        for index in range(num_gemms):
            self._add_parameter(
                f"weight{index}",
                (out_features, in_features),
                init_method or default_init,
                partition_dim=1 if parallel_mode == "row" else 0,
                dtype=params_dtype,
                device=device,
            )
            if bias:
                self._add_parameter(
                    f"bias{index}",
                    (out_features,),
                    torch.nn.init.zeros_,
                    partition_dim=None if parallel_mode == "row" else 0,
                    dtype=params_dtype,
                    device=device,
                )
            else:
                setattr(self, f"bias{index}", torch.Tensor())
        self._grouped_mm = kernels().fused(KernelName.GROUPED_MM, params_dtype)

    def forward(
        self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None, **unsupported: Any
    ) -> Any:
        """Apply each of the layers to its group of rows.

        ``inp`` is ``[T, in_features]``. Its first ``m_splits[0]`` rows go through the first layer, the next
        ``m_splits[1]`` rows through the second, and so on.

        Returns:
            ``[T, out_features]``; with ``return_bias`` also the list of biases.

        Raises:
            EngineError: A setting is not supported.
        """
        refuse_settings("GroupedLinear.forward", unsupported)
        del is_first_microbatch
        splits = [int(rows) for rows in m_splits]
        output = self._grouped_mm(inp, self._parts("weight"), splits)
        if self.apply_bias:
            rows = torch.tensor(splits, device=inp.device)
            output = output + torch.stack(self._parts("bias")).repeat_interleave(rows, dim=0)
        return (output, self._parts("bias")) if self.return_bias else output

    def _parts(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}{index}") for index in range(self.num_gemms)]
