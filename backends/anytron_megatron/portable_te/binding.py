"""The source of the portable modules' kernels: the hooks, bound once by the code that installs the alias."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.base.errors import EngineError
from anytron.kernels.contract import KernelName, KernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from anytron.kernels.contract import AttentionKernel, AttentionSpec, KernelSource


class Kernels:
    """Requests kernels for one type of device from the hooks. Modules request theirs when they are constructed."""

    def __init__(self, source: KernelSource, device_type: str) -> None:
        self._source = source
        self.device_type = device_type
        self._shared: dict[tuple[KernelName, torch.dtype, bool], Callable[..., Any]] = {}

    @property
    def invariant(self) -> bool:
        """Whether kernels that are requested now are company-invariant."""
        return getattr(self._source, "invariant", False)

    def attention(self, spec: AttentionSpec) -> AttentionKernel:
        """The kernel of one attention layer."""
        return self._source.attention_kernel(spec)

    def fused(self, name: KernelName, dtype: torch.dtype | None, **options: object) -> Callable[..., Any]:
        """A fused kernel for one module."""
        return self._source.fused_kernel(name, KernelSpec(self.device_type, dtype, MappingProxyType(options)))

    def shared(self, name: KernelName, dtype: torch.dtype) -> Callable[..., Any]:
        """A fused kernel for a function, which has no constructor; it is requested once per element type."""
        key = name, dtype, self.invariant
        if key not in self._shared:
            self._shared[key] = self.fused(name, dtype)
        return self._shared[key]


_bound: Kernels | None = None


def bind(source: KernelSource, device_type: str) -> Callable[[], None]:
    """Set the source of kernels for the portable modules of this process; return a function that undoes this."""
    global _bound
    before, _bound = _bound, Kernels(source, device_type)

    def undo() -> None:
        global _bound  # noqa: PLW0603
        _bound = before

    return undo


def kernels() -> Kernels:
    """The kernels of this process.

    Raises:
        EngineError: :func:`bind` was not called.
    """
    if _bound is None:
        raise EngineError(
            "The portable Transformer Engine has no kernels.",
            where="anytron_megatron.portable_te",
            why="its modules take kernels from the platform's hooks, and no hooks were bound in this process",
            fix="open a device stack with anytron.train.open_device_stack() before Megatron is imported",
        )
    return _bound
