"""Redirect functions that make tensors, move them, or return their device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _device as device_mode

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


# torch's own list of device constructors (torch.utils._device), and the *_like family.
TORCH_FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted",
    "empty_quantized", "empty_strided", "eye", "from_dlpack", "full", "full_like", "hamming_window", "hann_window",
    "kaiser_window", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor", "sparse_bsc_tensor",
    "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip

TENSOR_FACTORIES = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")

OTHER_FACTORIES = (
    (torch.fft, "fftfreq"), (torch.fft, "rfftfreq"),
    (torch.nested, "as_nested_tensor"), (torch.nested, "nested_tensor"),
)  # fmt: skip


def substitutions(runtime: DeviceRuntime, translate: DeviceTranslator) -> Iterator[Substitution]:
    """Redirect everything that makes tensors, moves them, or returns their device, to the runtime's device.

    It replaces factories, ``torch.load``, methods and a property of ``Tensor``, the function that parses the arguments
    of ``Module.to``, and types such as ``torch.cuda.FloatTensor``.
    """
    yield from _factory_substitutions(runtime, translate)
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
    """Return types under their CUDA names, with which Megatron's optimizers compare ``param.type()``."""
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


def _factory_substitutions(runtime: DeviceRuntime, translate: DeviceTranslator) -> Iterator[Substitution]:
    """Replace the factories of torch and of tensors, and ``torch.load``."""
    # `with torch.device("meta")` recognises factories by identity, in a set that torch fills at its first use.
    # A set that was filled after the wrapping would hold the wrappers and not the originals, and from_pretrained
    # would leave buffers such as inv_freq uninitialised, without an error. A set that was filled while transformers
    # loaded a model holds transformers' wrapper of linspace (meta_device_safe_creation_ops). So it is filled anew.
    device_mode._device_constructors.cache_clear()
    device_mode._device_constructors()
    can_pin = runtime.can_pin_memory()
    for name in TORCH_FACTORIES:
        yield _factory(torch, name, translate, can_pin)
    for name in TENSOR_FACTORIES:
        yield _factory(torch.Tensor, name, translate, can_pin)
    for owner, name in OTHER_FACTORIES:
        yield _factory(owner, name, translate, can_pin)
    yield Substitution(torch, "load", _load(torch.load, translate))


def _factory(owner: Any, name: str, translate: DeviceTranslator, can_pin: bool) -> Substitution:
    """Wrap a factory as thinly as possible: it is on the hot path."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            device = kwargs.get("device")
            if device is not None:
                kwargs["device"] = translate(device)
            if not can_pin and "pin_memory" in kwargs:
                del kwargs["pin_memory"]
        return original(*args, **kwargs)

    return Substitution(owner, name, factory)


def _load(original: Callable[..., Any], translate: DeviceTranslator) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, translate(map_location), *args, **kwargs)

    return load
