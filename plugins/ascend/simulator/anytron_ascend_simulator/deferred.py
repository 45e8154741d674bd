"""Call aten operators as on an asynchronous device: results get their shapes at once, their numbers later.

The numbers are computed when the stream reaches the call. Results get memory at once, and queued calls hold addresses,
not tensors. So memory that is freed too early is used again, as on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anytron_ascend_simulator import queues
from anytron_ascend_simulator.calls import Call, compute
from anytron_ascend_simulator.memory import CPU, from_pointer
from anytron_ascend_simulator.random_numbers import draw, is_random, seeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

META = torch.device("meta")
COPY = "aten::copy_"


class Place(NamedTuple):
    """A tensor's address and layout, which outlive the tensor."""

    pointer: int
    size: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """The place of a tensor of a device."""
        storage = tensor.untyped_storage()
        offset = int(tensor.storage_offset())
        return cls(storage.data_ptr(), storage.nbytes(), tensor.dtype, offset, tensor.size(), tensor.stride())

    def write(self, found: Tensor) -> None:
        """Write a tensor's numbers to this place."""
        if found.size() != self.shape or found.dtype != self.dtype:
            raise TypeError(
                f"the operator returned {found.dtype} {tuple(found.shape)}, but its meta kernel announced "
                f"{self.dtype} {tuple(self.shape)}"
            )
        if found.numel():
            from_pointer(*self).copy_(found)


NORMS = frozenset({"aten.native_layer_norm.default", "aten.native_group_norm.default"})
"""Operators whose statistics have the weight's dtype on the host, or else the input's; by meta kernels float32."""

MOST_SHAPES = 10_000
_SHAPES: dict[Any, tuple[Any, list[torch.Size]]] = {}
"""Results and the sizes of ``out=`` arguments, by operator and operands: meta kernels in Python are slow."""


@dataclass(frozen=True)
class _Shape:
    """One tensor of a result: an argument, or a new one."""

    argument: int | None
    size: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, arguments: list[Tensor]) -> _Shape:
        place = next((place for place, argument in enumerate(arguments) if argument is tensor), None)
        return cls(place, tensor.size(), tensor.stride(), tensor.dtype)

    def made(self, arguments: list[Tensor]) -> Tensor:
        if self.argument is not None:
            return arguments[self.argument]
        return torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=META)


def _with_statistics_of_the_host(result: tuple[Tensor, ...], given: list[Any]) -> tuple[Tensor, ...]:
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    dtype = tensors[min(1, len(tensors) - 1)].dtype
    return (result[0], *(statistic.to(dtype) for statistic in result[1:]))


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A result with its tensors, or its shapes, replaced."""
    if isinstance(value, (torch.Tensor, _Shape)):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(entry, function) for entry in value)
    return value


def _key(value: Any) -> Any:
    """The properties of an argument that decide shapes and dtypes."""
    if isinstance(value, torch.Tensor):
        return value.device, value.dtype, value.size(), value.stride()
    if isinstance(value, dict):
        return tuple((name, _key(entry)) for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_key, value))
    return type(value), value  # 1, 1.0 and True are equal, and give different dtypes


@dataclass(frozen=True)
class _Work:
    """A queued call without its tensors: it keeps no memory of the device alive."""

    operator: Any
    args: list[Any]
    kwargs: dict[str, Any]
    seed: int | None
    places: dict[int, Place]  # by the stand-in's id
    outputs: list[tuple[Tensor, Place]]  # stand-ins of ``out=`` arguments
    targets: list[Place | None]  # of the results' tensors; None = an argument
    default_dtype: torch.dtype  # when it was called: transformers changes it while it loads a model

    def run(self) -> None:
        now = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            self._run()
        finally:
            torch.set_default_dtype(now)

    def _run(self) -> None:
        real = {number: from_pointer(*place) for number, place in self.places.items()}
        found = [torch.empty(0, dtype=stand_in.dtype) for stand_in, _ in self.outputs]
        real |= {id(stand_in): one for (stand_in, _), one in zip(self.outputs, found, strict=True)}
        with seeded(self.seed):
            result = compute(self.operator, _real(self.args, real), _real(self.kwargs, real))
        for (_, place), one in zip(self.outputs, found, strict=True):
            place.write(one)
        for target, one in zip(self.targets, _leaves(result), strict=True):
            if target is not None:
                target.write(one)


def _real(value: Any, tensors: dict[int, Tensor]) -> Any:
    """Arguments with the device's memory instead of stand-ins."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    if isinstance(value, dict):
        return {key: _real(entry, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_real(entry, tensors) for entry in value)
    return CPU if isinstance(value, torch.device) and value == META else value


class DeferredCall(Call):
    """One call of an operator: stand-ins with the results' shapes now, the numbers when the stream reaches the call."""

    home = META

    def __init__(self, operator: Any) -> None:
        super().__init__(operator)
        self._places: dict[int, Place] = {}
        self._waits = torch.Tag.data_dependent_output in operator.tags
        self._targets: list[Place | None] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue the call on the current stream of the tensors' device.

        An operator waits for its stream and runs at once if its result's size depends on data, if an operand with
        dimensions is on the host, or if it has no meta kernel.
        """
        if self._operator._schema.name == COPY and CPU in (args[0].device, args[1].device):
            return self._copy_between(*args, **kwargs)
        given, named = self._arguments(args, kwargs)
        if len(self._devices) > 1:
            queues.finish_all()
            return Call(self._operator).run(args, kwargs)
        result = None if self._waits else self._shapes(given, named)
        if result is None:
            if self._views:
                queues.finish(queues.current_stream(self.device))
            return Call(self._operator).run(args, kwargs)
        self._resize_outputs()
        outputs = [(stand_in, Place.of(tensor)) for tensor, stand_in in self._outputs]
        seed = draw(named.pop("generator", None)) if is_random(self._operator) else None
        found = self._to_device(result[0])
        default_dtype = torch.get_default_dtype()
        work = _Work(self._operator, given, named, seed, self._places, outputs, self._targets, default_dtype)
        # Now the device has its streams: torch_npu makes them together with the first tensor.
        queues.enqueue(queues.current_stream(self.device), work.run)
        return found

    def _shapes(self, given: list[Any], named: dict[str, Any]) -> tuple[Any] | None:
        """The result without numbers, in a tuple; None if its shape cannot be told from the operands' shapes.

        Shapes that do not fit have none either: the operator itself refuses them then.
        """
        kept = {name: value for name, value in named.items() if name != "generator"}
        stand_ins = [stand_in for _, stand_in in (*self._views, *self._outputs)]
        key = (self._operator, torch.get_default_dtype(), _key(given), _key(kept))
        if key in _SHAPES:
            known, sizes = _SHAPES[key]
            for (_, stand_in), size in zip(self._outputs, sizes, strict=True):
                stand_in.resize_(size)
            return (_mapped(known, lambda shape: shape.made(stand_ins)),)
        try:
            result = compute(self._operator, given, kept)
            if str(self._operator) in NORMS:
                result = _with_statistics_of_the_host(result, given)
        except Exception:  # noqa: BLE001 - meta kernels have no error of their own for this
            return None
        if len(_SHAPES) >= MOST_SHAPES:
            _SHAPES.clear()
        sizes = [stand_in.size() for _, stand_in in self._outputs]
        _SHAPES[key] = _mapped(result, lambda tensor: _Shape.of(tensor, stand_ins)), sizes
        return (result,)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        stand_in = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
        self._places[id(stand_in)] = Place.of(tensor)
        return stand_in

    def _host_tensor(self, tensor: Tensor) -> Tensor:
        self._waits = self._waits or tensor.dim() > 0
        return tensor if self._waits else tensor.clone()

    def _new(self, result: Tensor) -> Tensor:
        made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=self.device)
        self._targets.append(Place.of(made))
        return made

    def _known(self, tensor: Tensor) -> Tensor:
        self._targets.append(None)
        return tensor

    def _copy_between(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy between host and device. Pinned memory is read and written when the stream gets there."""
        device, host = (source, target) if target.device == CPU else (target, source)
        stream = queues.current_stream(device.device)
        place = Place.of(device)
        if not non_blocking or not (host.is_pinned() or device is target):
            queues.finish(stream)
            Call(self._operator).run((target, source), {})
        elif device is target:
            late = source if source.is_pinned() else source.clone()
            queues.enqueue(stream, lambda: from_pointer(*place).copy_(late))
        else:
            queues.enqueue(stream, lambda: target.copy_(from_pointer(*place)))
        return target


def _leaves(result: Any) -> Iterator[Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for entry in result:
            yield from _leaves(entry)
