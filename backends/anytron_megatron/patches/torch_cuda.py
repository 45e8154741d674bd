"""Send ``torch.cuda`` and every ``"cuda"`` to the platform's device (:mod:`anytron_megatron.redirect`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.device.patches import Installed
from anytron_megatron.redirect import redirect_torch_cuda

if TYPE_CHECKING:
    from anytron.device.hooks.types import PatchContext


def redirect_to_platform(context: PatchContext) -> Installed:
    """Redirect ``torch.cuda`` to the platform's runtime."""
    return Installed(redirect_torch_cuda(context.platform.runtime()))
