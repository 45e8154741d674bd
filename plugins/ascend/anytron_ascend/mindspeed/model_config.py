"""Put the process's MindSpeed arguments into the configs of mcore-bridge's models."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def take_arguments(_original: Callable[..., None]) -> Callable[..., None]:
    """Replace ``ModelConfig._augment_mindspeed_defaults``: take the installed arguments.

    What Megatron's config has itself, such as ``variable_seq_lengths``, the engine has set there: MindSpeed's arguments
    of these names decide about its patches only.
    """

    def _augment_mindspeed_defaults(self: Any) -> None:
        from megatron.core.transformer import TransformerConfig
        from mindspeed.args_utils import get_full_args

        megatrons = {field.name for field in dataclasses.fields(TransformerConfig)}
        for name, value in vars(get_full_args()).items():
            if name not in megatrons:
                setattr(self, name, value)

    return _augment_mindspeed_defaults
