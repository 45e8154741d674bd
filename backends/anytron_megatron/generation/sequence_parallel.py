"""Generate without sequence parallelism: a step has one token of each sequence, which cannot be split."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

SWITCHES = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""Attributes of modules and their configurations that turn it on (``megatron/core/transformer/utils.py``)."""


@contextlib.contextmanager
def without_sequence_parallel(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Turn sequence parallelism off within the block.

    Only what was on is turned on again. (Megatron's ``set_model_to_sequence_parallel`` turns everything on that has
    such an attribute, also modules that were built without.)
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    configs = [module.config for module in modules if hasattr(module, "config")]
    holders = {id(holder): holder for holder in (*modules, *configs)}.values()
    on = [(holder, name) for holder in holders for name in SWITCHES if vars(holder).get(name) is True]
    for holder, name in on:
        setattr(holder, name, False)
    try:
        yield
    finally:
        for holder, name in on:
            setattr(holder, name, True)
