"""Multi-token prediction without labels: there is nothing for it to predict."""

from __future__ import annotations

import copy
import functools
import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from anytron_megatron.patches.shadow import shadowed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def leaving_out_without_labels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GPTModel.forward``: without labels the main model runs alone, as it would without MTP layers.

    Versions ask in different places whether there are MTP layers: the model (0.12 to 0.16), and its
    configuration (0.16). Both are other ones for the time of this call; the configuration, which other
    modules share, is copied.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        labels = signature.bind(self, *args, **kwargs).arguments.get("labels")
        if labels is not None or not getattr(self, "mtp_process", False):
            return original(self, *args, **kwargs)
        config = copy.copy(self.config)
        config.mtp_num_layers = None
        with ExitStack() as touched:
            touched.enter_context(shadowed(self, "mtp_process", False))
            touched.enter_context(shadowed(self, "config", config))
            return original(self, *args, **kwargs)

    return forward
