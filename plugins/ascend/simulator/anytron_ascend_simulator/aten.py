"""Run aten operators of simulated NPU tensors on the host, on the same memory.

torch_npu registers a kernel for every aten operator that it has on the device. Each of them, apart from
those that only move metadata or memory, is replaced by one that runs the CPU operator on host views.
Tensors of two devices in one call are refused as the real device refuses them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator.kernels.contract import gradients
from anytron_ascend_simulator.memory import CPU, host_view, to_device
from anytron_ascend_simulator.random_numbers import drawing_from, is_random

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def _matmul_backward(
    grad: Tensor, self: Tensor, other: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    found = gradients(torch.matmul, (self, other), grad)
    kept = (f.to(x.dtype) if wanted else None for f, x, wanted in zip(found, (self, other), mask, strict=True))
    return next(kept), next(kept)


def _mm_as(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.matmul(self.to(out_dtype), mat2.to(out_dtype))


def _addmm_as(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return beta * self.to(out_dtype) + alpha * _mm_as(mat1, mat2, out_dtype)


def _masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask * scale


def _histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    # The device counts integers too; the host does not.
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


FORMULAS: dict[str, Callable[..., object]] = {
    "aten.matmul_backward.default": _matmul_backward,
    "aten.mm.dtype": _mm_as,
    "aten.bmm.dtype": _mm_as,
    "aten.addmm.dtype": _addmm_as,
    "aten.baddbmm.dtype": _addmm_as,
    "aten._masked_scale.default": _masked_scale,
    "aten.histc.default": _histc,
}
"""Formulas that replace the CPU's operators, by the operator's name; the signatures are aten's."""

KEPT = frozenset(
    {
        "empty.memory_format",
        "empty_strided",
        "empty_with_format",
        "empty_like",
        "as_strided",
        "view",
        "_reshape_alias",
        "unfold",
        "alias",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "resize_",
        "is_set_to",
        "_local_scalar_dense",
        "is_pinned",
        "_pin_memory",
        "record_stream",
        "_copy_from",
        "_copy_from_and_resize",
        "_to_copy",
        "to.device",
        "_fused_adamw_",
    }
)
"""Operators whose torch_npu kernel stays: it touches metadata only, copies through the runtime, which checks pointers,
or calls an aclnn kernel of the simulator."""

HOST_ARGUMENTS = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_"}
)
"""Operators that accept host tensors together with device tensors, as in torch (indices, sources of copies)."""

CALLS: Counter[str] = Counter()
"""How often each operator ran, by name."""

_library: torch.library.Library | None = None


class DeviceMismatchError(RuntimeError):
    """One operator was given tensors of several devices."""


def install() -> int:
    """Replace torch_npu's aten kernels; return the number of replaced kernels."""
    global _library  # noqa: PLW0603 - torch drops the kernels together with this object
    _library = torch.library.Library("aten", "IMPL")
    count = 0
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        operator = _operator(name)
        if operator is not None:
            _library.impl(name.removeprefix("aten::"), _kernel(operator), "PrivateUse1", allow_override=True)
            count += 1
    return count


def _operator(name: str) -> Any:
    """The aten operator to replace, or None."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if namespace != "aten" or rest in KEPT:
        return None
    operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    # Views (a result that shares memory and is not written) are metadata: torch_npu's own are right.
    results = () if operator is None else operator._schema.returns
    return None if any(result.alias_info and not result.alias_info.is_write for result in results) else operator


def _kernel(operator: Any) -> Callable[..., Any]:
    name = str(operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        with torch._C._AutoDispatchBelowAutograd():
            return _Call(operator).run(args, kwargs)

    return kernel


class _Call:
    """One call of one operator: arguments to host views, results back to the device."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._devices: set[torch.device] = set()
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        host_args = [self._to_host(value) for value in args]
        outputs = {argument.name for argument in self._operator._schema.arguments if argument.is_out}
        host_kwargs = {
            key: self._output(value) if key in outputs else self._to_host(value) for key, value in kwargs.items()
        }
        if len(self._devices) > 1 and self._operator._schema.name != "aten::copy_":
            self._refuse(sorted(map(str, self._devices)))
        result = self._compute(host_args, host_kwargs)
        for tensor, found in self._outputs:
            if found.size() != tensor.size():
                tensor.resize_(found.size())
            host_view(tensor).copy_(found)
        return self._to_device(result)

    def _compute(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        compute = FORMULAS.get(str(self._operator), self._operator)
        if not is_random(self._operator):
            return compute(*args, **kwargs)
        with drawing_from(kwargs.pop("generator", None)):
            return compute(*args, **kwargs)

    def _to_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor_to_host(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_host(entry) for entry in value)
        if isinstance(value, torch.device) and value.type == "npu":
            self._devices.add(value if value.index is not None else _current())
            return CPU
        return value

    def _output(self, value: Any) -> Any:
        """Stand in for an ``out=`` argument: the operator may resize it, which a view cannot be."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._output(entry) for entry in value)
        if value.device.type != "npu":
            return self._tensor_to_host(value)
        self._devices.add(value.device)
        found = torch.empty(0, dtype=value.dtype)
        self._outputs.append((value, found))
        return found

    def _tensor_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "npu":
            self._devices.add(tensor.device)
            view = host_view(tensor)
            self._views.append((tensor, view))
            return view
        # Scalars of the host may join device tensors everywhere in torch.
        if tensor.dim() and tensor.device == CPU and self._operator._schema.name not in HOST_ARGUMENTS:
            self._refuse(["cpu", *sorted(map(str, self._devices or {_current()}))])
        return tensor

    def _to_device(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor) and result.device == CPU:
            for tensor, view in (*self._views, *self._outputs):
                if result is view:
                    return tensor
            return to_device(result, next(iter(self._devices), _current()))
        if isinstance(result, (list, tuple)):
            return type(result)(self._to_device(entry) for entry in result)
        return result

    def _refuse(self, devices: list[str]) -> None:
        raise DeviceMismatchError(
            f"{self._operator}: Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(devices)}! (Ascend simulator)"
        )


def _current() -> torch.device:
    return torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]  # torch_npu adds it
