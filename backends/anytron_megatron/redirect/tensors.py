"""Redirect methods of tensors and modules that take a device or tell it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from anytron.device.runtime import DeviceRuntime
    from anytron_megatron.redirect.devices import DeviceTranslator

LEGACY_TYPES = (
    "BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "FloatTensor", "HalfTensor",
    "IntTensor", "LongTensor", "ShortTensor",
)  # fmt: skip


def substitutions(runtime: DeviceRuntime, translate: DeviceTranslator) -> Iterator[Substitution]:
    """Replace ``Tensor.to/cuda/type/is_cuda/pin_memory/record_stream``, what others parse ``to`` by, legacy types."""
    tensor = torch.Tensor
    device_type = runtime.device_type
    move = tensor.to

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
        target = translate.indexed(None) if device is None else translate(device)
        return move(self, target, non_blocking=non_blocking, memory_format=memory_format or torch.preserve_format)

    def is_cuda(self: Tensor) -> bool:
        return self.device.type == device_type

    yield Substitution(tensor, "to", _to(move, translate))
    yield Substitution(tensor, "cuda", cuda)
    yield Substitution(tensor, "is_cuda", property(is_cuda))
    yield Substitution(tensor, "type", _type(tensor.type, device_type))
    # Module.to, TensorDict.to and others have their arguments parsed in C++, which asks for an accelerator where it
    # meets the integers that current_device() returns.
    yield Substitution(torch._C._nn, "_parse_to", _parse_to(torch._C._nn._parse_to, translate))
    if not runtime.can_pin_memory():
        yield Substitution(tensor, "pin_memory", lambda self, *_, **__: self)
    if runtime.new_stream() is None:
        # Everything runs in order, so no memory has to be kept for another stream.
        yield Substitution(tensor, "record_stream", lambda *_: None)
    else:
        record_stream = tensor.record_stream
        yield Substitution(tensor, "record_stream", lambda self, stream: record_stream(self, stream.native))
    legacy = torch if device_type == "cpu" else getattr(torch, device_type, None)
    for name in LEGACY_TYPES:
        if hasattr(legacy, name):
            yield Substitution(torch.cuda, name, getattr(legacy, name), own=False)


def _to(original: Callable[..., Any], translate: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            # The first positional argument is a device, a dtype or a tensor; only devices are translated.
            return original(self, translate(args[0]), *args[1:], **kwargs)
        if "device" in kwargs:
            kwargs["device"] = translate(kwargs["device"])
        return original(self, **kwargs)

    return to


def _parse_to(original: Callable[..., Any], translate: DeviceTranslator) -> Callable[..., Any]:
    to = _to(lambda _, *args, **kwargs: original(*args, **kwargs), translate)

    @functools.wraps(original)
    def parse(*args: Any, **kwargs: Any) -> Any:  # a function, not a partial: torch.compile looks for one here
        return to(None, *args, **kwargs)

    return parse


def _type(original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Give types their CUDA names, with which Megatron's optimizers compare ``param.type()``."""
    native = "torch." if device_type == "cpu" else f"torch.{device_type}."

    def of_device(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            # Sparse and meta tensors have names of their own ("torch.sparse.FloatTensor").
            return "torch.cuda." + name[len(native) :] if self.device.type == device_type else name
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = native + dtype[len("torch.cuda.") :]
        return original(self, dtype, non_blocking, **kwargs)

    return of_device
