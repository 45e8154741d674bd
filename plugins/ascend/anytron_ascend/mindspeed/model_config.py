"""Put the process's MindSpeed arguments into the configs of mcore-bridge's models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MEGATRONS = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "multi_latent_attention",
        "transformer_impl",
    }
)
"""Arguments that Megatron's config has itself; the engine sets them there."""


def take_arguments(_original: Callable[..., None]) -> Callable[..., None]:
    """Replace ``ModelConfig._augment_mindspeed_defaults``: take the installed arguments."""

    def _augment_mindspeed_defaults(self: Any) -> None:
        from mindspeed.args_utils import get_full_args

        for name, value in vars(get_full_args()).items():
            if name not in _MEGATRONS:
                setattr(self, name, value)

    return _augment_mindspeed_defaults
