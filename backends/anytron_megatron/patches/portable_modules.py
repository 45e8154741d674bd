"""Give the portable Transformer Engine the name of the real one (:mod:`anytron_megatron.portable_te`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.device.patches import Installed
from anytron_megatron.portable_te.alias import install

if TYPE_CHECKING:
    from anytron.device.hooks.types import PatchContext


def alias_portable_modules(context: PatchContext) -> Installed:
    """Put the portable modules under the name ``transformer_engine``, with the platform's kernels."""
    return Installed(install(context.kernels, context.platform.runtime().device_type))
