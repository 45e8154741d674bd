"""Where the portable modules get their kernels from: the hooks, given once by whoever installs the alias."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.errors import EngineError
from anytron.hooks.types import AttentionSpec, KernelName, KernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from anytron.hooks.facade import Hooks
    from anytron.hooks.types import AttentionKernel
    from anytron.masks import ModelTraits


class Kernels:
    """Ask the hooks for kernels on one kind of device. Modules do so when they are constructed.

    Args:
        hooks: The facade over all plugins.
        device_type: ``torch.device`` type of the operands.
    """

    def __init__(self, hooks: Hooks, device_type: str) -> None:
        self._hooks = hooks
        self.device_type = device_type
        self._shared: dict[tuple[KernelName, torch.dtype], Callable[..., Any]] = {}

    def attention(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        qk_dim: int,
        v_dim: int,
        scale: float,
        traits: ModelTraits,
        dropout: float,
        sinks: bool,
    ) -> AttentionKernel:
        """The kernel of one attention layer; arguments as in :class:`~anytron.hooks.types.AttentionSpec`."""
        return self._hooks.attention_kernel(
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                qk_dim=qk_dim,
                v_dim=v_dim,
                scale=scale,
                traits=traits,
                dropout=dropout,
                sinks=sinks,
                device_type=self.device_type,
            )
        )

    def fused(self, name: KernelName, dtype: torch.dtype | None, **options: object) -> Callable[..., Any]:
        """A fused kernel for one module."""
        return self._hooks.fused_kernel(name, KernelSpec(self.device_type, dtype, MappingProxyType(options)))

    def shared(self, name: KernelName, dtype: torch.dtype) -> Callable[..., Any]:
        """A fused kernel for a function, which has no constructor to ask in: asked once per element type."""
        kernel = self._shared.get((name, dtype))
        if kernel is None:
            kernel = self._shared[name, dtype] = self.fused(name, dtype)
        return kernel


_bound: Kernels | None = None


def bind(hooks: Hooks, device_type: str) -> Callable[[], None]:
    """Give the portable modules of this process their hooks.

    Args:
        hooks: The facade over all plugins.
        device_type: ``torch.device`` type of the platform.

    Returns:
        The function that restores what was bound before.
    """
    global _bound
    before, _bound = _bound, Kernels(hooks, device_type)

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
            fix="apply the patch megatron.portable-transformer-engine, or call binding.bind(hooks, device_type)",
        )
    return _bound
