"""Take models apart that are not needed any more, so that their memory and process groups go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def dismantle(models: Iterable[nn.Module]) -> None:
    """Let the modules of some models forget everything they refer to; no module can be used afterwards.

    Dropping a model is not enough. A token dispatcher keeps tensors of its last pass; their graph ends in
    gradient accumulators, whose hooks keep the data-parallel wrapper, which keeps the model: a cycle through
    autograd's graph, where the garbage collector does not look. And rotary embeddings, which know their process
    group, are keys of a cache of their class (``RotaryEmbedding.forward``). Over gloo each group that is left
    behind costs three threads, one of which wakes up a hundred times a second.

    Args:
        models: Models, or their wrappers.
    """
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        vars(module).clear()
