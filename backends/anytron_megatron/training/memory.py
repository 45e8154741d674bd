"""Free the memory and the process groups of models that are no longer needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def release_memory(models: Iterable[nn.Module]) -> None:
    """Clear the attributes of all modules of some models; none can be used afterwards.

    Dropping the last reference to a model is not enough. A token dispatcher keeps tensors of its last pass; their
    graph ends in gradient accumulators, whose hooks keep the data-parallel wrapper, which keeps the model: a cycle
    through autograd's graph, where the garbage collector does not look. And rotary embeddings, which hold their
    process group, are keys of a cache of their class (``RotaryEmbedding.forward``). Over gloo each group that is left
    behind costs three threads, one of which wakes up a hundred times a second.
    """
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        vars(module).clear()
