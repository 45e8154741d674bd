"""Fixes of code that expects CUDA: torch.cuda, torch.compile, Transformer Engine, and a warning about generators."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from anytron.device.patches import Installed

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.device.hooks.types import PatchContext


def redirect_to_platform(context: PatchContext) -> Installed:
    """Redirect ``torch.cuda`` to the platform's runtime."""
    from anytron_megatron.redirect import redirect_torch_cuda

    return Installed(redirect_torch_cuda(context.platform.runtime()))


def leave_uncompiled(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``torch.compile``: return the function itself or, without one, a decorator that does so."""

    def compile(model: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:  # noqa: A001
        return (lambda function: function) if model is None else model

    return compile


def alias_portable_modules(context: PatchContext) -> Installed:
    """Put the portable modules under the name ``transformer_engine``, with the platform's kernels."""
    # They may import what patches before this one prepare.
    from anytron_megatron.portable_te.alias import install

    return Installed(install(context.kernels, context.platform.runtime().device_type))


LOGGER = "megatron.core.tensor_parallel.random"
MESSAGE = "CPU RNG state changed within GPU RNG context"


def drop_warning(context: PatchContext) -> Installed:
    """Filter the message if the device draws from the host's generator.

    The tracker forks the device's generator and warns if the host's state has changed meanwhile. Where both are
    one object it always changes, and the fork restores it.
    """
    import torch

    if context.platform.runtime().default_generator() is not torch.default_generator:
        return Installed(lambda: None, "not needed: the device has its own generator")
    logger = logging.getLogger(LOGGER)

    def keep(record: logging.LogRecord) -> bool:
        return record.msg != MESSAGE

    logger.addFilter(keep)
    return Installed(lambda: logger.removeFilter(keep))
