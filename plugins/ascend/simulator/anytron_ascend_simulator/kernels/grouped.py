"""``npu_grouped_matmul``: rows in groups, each with its own weight; or the reduced dimension in groups.

Source: torch_npu's documentation of ``npu_grouped_matmul`` and op-plugin's GroupedMatmulKernelNpuOpApi.cpp.
Modelled is what training uses: one ``x``, one weight ``[G, K, N]`` or G weights ``[K, N]`` (for the reduced dimension
one ``[K, N]``), one output, no quantisation, bias or activation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator.kernels.contract import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ROWS, REDUCED = 0, 2
"""``group_type``."""
SUMS, COUNTS = 0, 1
"""``group_list_type``."""


def _grouped_matmul(*arguments: Any) -> None:
    x, weight, *unmodelled = arguments[:8]
    groups, *activation = arguments[8:12]
    split_item, group_type, list_type, activation_type = arguments[12:16]
    outputs = arguments[-3]
    require(not any(unmodelled) and not any(activation) and activation_type == 0, "only plain products are modelled")
    require(len(x) == 1 and len(outputs) == 1, "only one x and one output are modelled")
    if len(weight) > 1:  # "single, multiple, single" in the documentation
        require(group_type == ROWS, f"several weights belong to group_type 0, not {group_type}")
        require(all(matrix.dim() == 2 for matrix in weight), "each of several weights is [K, N]")
        weight = [torch.stack(weight)]
    require(split_item in (2, 3), f"split_item {split_item} makes several outputs; 2 and 3 make one")
    require(list_type in (SUMS, COUNTS), f"group_list_type {list_type}")
    require(groups is not None and groups.dtype == torch.int64, "group_list is an int64 tensor")
    require(x[0].dtype == weight[0].dtype, f"x is {x[0].dtype}, weight {weight[0].dtype}")
    counts = groups.tolist() if list_type == COUNTS else groups.diff(prepend=groups.new_zeros(1)).tolist()
    require(min(counts) >= 0, f"group_list {groups.tolist()} is not ascending")
    compute = {ROWS: _rows, REDUCED: _reduced}.get(group_type)
    require(compute is not None, f"group_type {group_type}: 0 (rows) and 2 (reduced dimension) are modelled")
    assert compute is not None
    compute(x[0].float(), weight[0].float(), counts, outputs[0])


def _rows(x: Tensor, weight: Tensor, counts: list[int], output: Tensor) -> None:
    """``[T, K]`` by ``[G, K, N]`` -> ``[T, N]``."""
    require(weight.dim() == 3 and len(counts) == weight.size(0), f"{len(counts)} groups, weight {tuple(weight.shape)}")
    require(x.size(-1) == weight.size(1), f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    require(sum(counts) <= x.size(0), f"group_list asks for {sum(counts)} rows, x has {x.size(0)}")
    output.zero_()
    begin = 0
    for count, matrix in zip(counts, weight, strict=True):
        output[begin : begin + count].copy_(x[begin : begin + count] @ matrix)
        begin += count


def _reduced(x: Tensor, weight: Tensor, counts: list[int], output: Tensor) -> None:
    """``[M, T]`` by ``[T, N]`` -> ``[G, M, N]``."""
    require(x.size(1) == weight.size(0), f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    require(sum(counts) <= x.size(1), f"group_list asks for {sum(counts)} columns, x has {x.size(1)}")
    begin = 0
    for index, count in enumerate(counts):
        output[index].copy_(x[:, begin : begin + count] @ weight[begin : begin + count])
        begin += count
