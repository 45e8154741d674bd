"""Redirect functions that make tensors: translate ``device=``, and drop ``pin_memory=`` where it is impossible."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _device as device_mode

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anytron.device.runtime import DeviceRuntime
    from anytron_megatron.redirect.devices import DeviceTranslator

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
    """Replace torch's factories and those of tensors, and ``torch.load``."""
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
