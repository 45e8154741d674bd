"""Distributed checkpoints of megatron-core 0.12 with a torch that asks for the serialisation format."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def naming_the_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.distributed.checkpoint.filesystem._write_item`` as Megatron calls it: torch's own format.

    megatron-core 0.13 looks for the parameter as this does (filesystem_async.py, line 372).
    """
    parameters = inspect.signature(original).parameters
    if "serialization_format" not in parameters:
        return original
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return functools.partial(original, serialization_format=SerializationFormat.TORCH_SAVE)
