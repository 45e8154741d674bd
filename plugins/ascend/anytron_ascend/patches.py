"""Patches for functions that torch_npu lacks, for every adaptor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron import Patch, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

PATCHES = (
    Patch(
        id="ascend.assert-async",
        target="torch:_assert_async",
        phase=Phase.BEFORE_BUILD,
        reason=(
            "torch_npu has no kernel of aten::_assert_async: it would run on the host, which "
            "TORCH_NPU_FALLBACK_CPU_DISABLE forbids. mcore-bridge checks with it that a sequence has a placeholder for "
            "each feature of its images"
        ),
        upstream="torch_npu 2.13.0, csrc/aten/npu_native_functions.yaml; mcore_bridge/model/mm_gpts/utils.py, line 152",
        remove_when="torch_npu has a kernel of aten::_assert_async",
        replacement=f"{__name__}:assert_at_once",
    ),
)


def assert_at_once(original: Callable[..., None]) -> Callable[..., None]:
    """Replace ``torch._assert_async``: wait for a tensor of an NPU and read it; pass other tensors to torch."""

    def assert_now(input: Tensor, assert_msg: str | None = None) -> None:
        if input.device.type != "npu":
            original(*(one for one in (input, assert_msg) if one is not None))
        elif not input.item():
            raise RuntimeError(assert_msg or "Expected Tensor with single nonzero value, but got zero")

    return assert_now
