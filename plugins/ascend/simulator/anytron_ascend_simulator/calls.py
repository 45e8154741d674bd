"""One call of an aten operator on simulated NPU tensors, computed by the host on the device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator.kernels.contract import gradients
from anytron_ascend_simulator.memory import CPU, host_view, to_device
from anytron_ascend_simulator.random_numbers import draw, is_random, seeded

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

HOST_ARGUMENTS = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_"}
)
"""Operators that accept host tensors together with device tensors, as in torch (indices, sources of copies)."""


class DeviceMismatchError(RuntimeError):
    """One operator was given tensors of several devices."""


def compute(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator, or the formula that replaces it."""
    return FORMULAS.get(str(operator), operator)(*args, **kwargs)


class Call:
    """One call of an operator, computed at once: on host views of its arguments, with results on the device."""

    home = CPU
    """Where the stand-ins of device tensors are."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._devices: set[torch.device] = set()
        self._views: list[tuple[Tensor, Tensor]] = []
        self._outputs: list[tuple[Tensor, Tensor]] = []

    @property
    def device(self) -> torch.device:
        """The device of the operands, or the current one."""
        return next(iter(self._devices), _current())

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the operator with the arguments that torch's dispatcher gives."""
        given, named = self._arguments(args, kwargs)
        seed = draw(named.pop("generator", None)) if is_random(self._operator) else None
        with seeded(seed):
            result = compute(self._operator, given, named)
        self._resize_outputs()
        for tensor, found in self._outputs:
            host_view(tensor).copy_(found)
        return self._to_device(result)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with stand-ins for tensors of the device."""
        given = [self._to_host(value) for value in args]
        outputs = {argument.name for argument in self._operator._schema.arguments if argument.is_out}
        named = {key: self._output(value) if key in outputs else self._to_host(value) for key, value in kwargs.items()}
        if len(self._devices) > 1 and self._operator._schema.name != "aten::copy_":
            self._refuse(sorted(map(str, self._devices)))
        return given, named

    def _resize_outputs(self) -> None:
        for tensor, found in self._outputs:
            if found.size() != tensor.size():
                tensor.resize_(found.size())

    def _to_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor_to_host(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_host(entry) for entry in value)
        if isinstance(value, torch.device) and value.type == "npu":
            self._devices.add(value if value.index is not None else _current())
            return self.home
        return value

    def _output(self, value: Any) -> Any:
        """Stand in for an ``out=`` argument: the operator may resize it, which a view cannot be."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._output(entry) for entry in value)
        if value.device.type != "npu":
            return self._tensor_to_host(value)
        self._devices.add(value.device)
        found = torch.empty(0, dtype=value.dtype, device=self.home)
        self._outputs.append((value, found))
        return found

    def _tensor_to_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "npu":
            self._devices.add(tensor.device)
            view = self._stand_in(tensor)
            self._views.append((tensor, view))
            return view
        # Scalars of the host may join device tensors everywhere in torch.
        if tensor.dim() and tensor.device == CPU and self._operator._schema.name not in HOST_ARGUMENTS:
            self._refuse(["cpu", *sorted(map(str, self._devices or {_current()}))])
        return self._host_tensor(tensor)

    def _to_device(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor) and result.device == self.home:
            for tensor, view in (*self._views, *self._outputs):
                if result is view:
                    return self._known(tensor)
            return self._new(result)
        if isinstance(result, (list, tuple)):
            return type(result)(self._to_device(entry) for entry in result)
        return result

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """What the operator gets for a tensor of the device."""
        return host_view(tensor)

    def _host_tensor(self, tensor: Tensor) -> Tensor:
        """What the operator gets for a tensor of the host."""
        return tensor

    def _known(self, tensor: Tensor) -> Tensor:
        """Return a tensor that an operator was given and gives back."""
        return tensor

    def _new(self, result: Tensor) -> Tensor:
        """Return a tensor of the device for a result."""
        return to_device(result, self.device)

    def _refuse(self, devices: list[str]) -> None:
        raise DeviceMismatchError(
            f"{self._operator}: Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(devices)}! (Ascend simulator)"
        )


def _current() -> torch.device:
    return torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]  # torch_npu adds it
