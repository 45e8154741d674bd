"""Parts of tensors and their places in the tensors of the whole model.

The places come from Megatron's ``sharded_state_dict``, and the files have Megatron's format ``torch_dist``. Megatron's
own writer and reader are not used: they write in forked processes, unpickle what they read, gather a distributed
optimizer's whole state on every data-parallel rank before saving it, and differ from version to version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from anytron.base.errors import EngineError
from anytron_megatron.checkpoint.rectangles import rectangles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


Place: TypeAlias = ShardedTensor | ShardedTensorFactory
"""A parameter's place in the whole model. A factory stands for several parts that each have a place, such as the two
halves of a gated layer."""


@dataclass(frozen=True)
class Shard:
    """A rectangle of a tensor of the whole model.

    Attributes:
        key: The tensor's name in the checkpoint.
        data: The rectangle's values, with as many axes as the whole tensor: a view of the model's or the optimizer's
            memory, or a copy if ``SavedTensor.merge`` is set.
        offset: Offset of the rectangle, in elements along each axis.
        shape: Shape of the whole tensor.
        flexible: Whether ``shape`` may differ in other layouts: the vocabulary is padded for the tensor-parallel size.
    """

    key: str
    data: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flexible: bool = False


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of this rank, cut into the shards that a checkpoint holds.

    Attributes:
        tensor: A parameter or buffer, or one of the optimizer's moments.
        shards: The tensor's shards.
        merge: Function that joins the shards to the whole tensor; None if the shards are views of ``tensor``.
    """

    tensor: Tensor
    shards: tuple[Shard, ...]
    merge: Callable[[], Tensor] | None = None

    def complete(self) -> None:
        """Copy the shards, once they have been read, into the tensor; do nothing if they are views of it."""
        if self.merge is not None:
            self.tensor.copy_(self.merge())


def whole(place: Place, tensor: Tensor, key: str) -> SavedTensor:
    """Cut a tensor that has a parameter's shape into shards, in the same way as the parameter.

    Args:
        place: The parameter's place in the whole model.
        tensor: The parameter, or a moment that the optimizer keeps of it.
        key: The tensor's name in the checkpoint.
    """
    tensor = tensor.detach()
    if isinstance(place, ShardedTensor):
        return SavedTensor(tensor, (_shard(place, tensor, key),))
    built = replace(place, key=key, data=tensor).build()
    parts = list(nested_values({"": built}))
    shards = tuple(_shard(part, part.data, part.key) for part in parts)
    if all(_is_view(part.data, tensor) for part in parts):
        return SavedTensor(tensor, shards)
    return SavedTensor(tensor, shards, partial(place.merge_fn, dict_list_map_outplace(_data, built)))


def flat_part(place: Place, parameter: Tensor, tensor: Tensor, start: int, key: str) -> SavedTensor:
    """Cut into shards the part of a flattened parameter that a rank of the distributed optimizer holds.

    Such a part can begin and end anywhere, but the format has rectangles only: so the part is cut into a few
    rectangles. Then no rank needs data of another rank to save or load.

    Args:
        place: The parameter's place in the whole model.
        parameter: The whole parameter, contiguous.
        tensor: This rank's part of the parameter or of one of its moments, one-dimensional.
        start: Index of the part's first element in the flattened parameter.
        key: The whole tensor's name in the checkpoint.

    Raises:
        EngineError: The checkpoint splits the parameter into parts that are not contiguous in it.
    """
    return SavedTensor(tensor, tuple(_flat_shards(whole(place, parameter, key), parameter, tensor.detach(), start)))


def _flat_shards(cut: SavedTensor, parameter: Tensor, tensor: Tensor, start: int) -> Iterator[Shard]:
    for shard in cut.shards:
        if not _is_view(shard.data, parameter) or not shard.data.is_contiguous():
            raise EngineError(
                "The state of this model's distributed optimizer cannot be saved.",
                where=shard.key,
                why="the layer keeps the parameter in a different order than the checkpoint does",
                fix="set engine.distributed_optimizer=false",
            )
        first = int(shard.data.storage_offset() - parameter.storage_offset())
        begin, end = max(start - first, 0), min(start + tensor.numel() - first, shard.data.numel())
        for offset, size, position in rectangles(tuple(shard.data.shape), begin, end):
            data = tensor[first + position - start :][: math.prod(size)].view(size)
            place = tuple(own + more for own, more in zip(shard.offset, offset, strict=True))
            yield replace(shard, data=data, offset=place)


def _shard(place: ShardedTensor, tensor: Tensor, key: str) -> Shard:
    data = tensor[(None,) * place.prepend_axis_num]
    return Shard(key, data, tuple(place.global_offset), tuple(place.global_shape), place.allow_shape_mismatch)


def _is_view(part: Tensor, tensor: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _data(part: Any) -> Tensor:
    tensor: Tensor = part.data
    return tensor
