"""The tensors that a checkpoint holds of one model on this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import nn

from anytron_megatron.checkpoint.optimizer_state import optimizer_tensors
from anytron_megatron.checkpoint.shards import whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron_megatron.checkpoint.shards import Place, SavedTensor
    from anytron_megatron.lora.adapters import Adapters
    from anytron_megatron.training.trained_model import TrainedModel


def trained_tensors(role: str, trained: TrainedModel, adapters: Adapters | None) -> list[SavedTensor]:
    """Collect what an update changes: weights, buffers and the optimizer's state.

    Args:
        role: ``policy`` or ``critic``; begins each key.
        trained: The model.
        adapters: What is trained in place of its own weights.
    """
    if adapters is None:
        places = list(_places([chunk.module.module for chunk in trained.chunks]))
    else:
        # Not every engine has the libraries that adapters need.
        from anytron_megatron.checkpoint.adapter_places import adapter_places

        places = list(adapter_places(adapters))
    weights = [whole(place, place.data, f"{role}.{place.key}") for place in places]
    by_parameter = {id(place.data): (place.key, place) for place in places}
    return [*weights, *optimizer_tensors(trained.optimizer, by_parameter, role)]


def _places(modules: Sequence[nn.Module]) -> Iterator[Place]:
    """Yield the places of trainable parameters and buffers.

    Frozen ones are those of the model directory. Extra states are left out: they are pickles of vendors' layers. What
    they hold (scales of FP8 with delayed scaling) is measured anew within a few updates.
    """
    for module in modules:
        # Each layer and each expert has a name of its own: layers differ, and experts move between ranks.
        metadata = {"non_homogeneous_layers": True, "singleton_local_shards": True}
        state = cast("Any", module).sharded_state_dict(metadata=metadata)
        for place in state.values():
            if isinstance(place, ShardedObject):
                continue
            if not isinstance(place.data, nn.Parameter) or place.data.requires_grad:
                yield place
