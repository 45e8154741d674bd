"""Decide which rank writes which tensors, and list them for the table of contents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from anytron.base.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from anytron_megatron.checkpoint.shards import Shard


@dataclass(frozen=True)
class WritePlan:
    """What one rank writes.

    Attributes:
        tensors: Live tensors by their places.
        table: The table of contents of the whole checkpoint, without where tensors lie in files; the same everywhere.
    """

    tensors: list[tuple[MetadataIndex, Tensor]]
    table: Metadata


@dataclass(frozen=True, order=True)
class _Description:
    """A shard without its data. Equal ones are replicas."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, self.offset)


def plan_writing(shards: Iterable[Shard]) -> WritePlan:
    """Share out the writing between the ranks that hold the same, as evenly as possible. A collective.

    Raises:
        EngineError: The ranks together do not have each element once.
    """
    own = {_Description(shard.key, shard.offset, tuple(shard.data.shape), shard.shape): shard.data for shard in shards}
    described = {description: data.dtype for description, data in own.items()}
    ranks: list[dict[_Description, torch.dtype]] = [described] * dist.get_world_size()
    dist.all_gather_object(ranks, described)
    writers = _share_out(ranks)
    table = Metadata({**_list(ranks)}, storage_data={})
    rank = dist.get_rank()
    return WritePlan([(one.index, data) for one, data in own.items() if writers[one] == rank], table)


def _share_out(ranks: Sequence[dict[_Description, torch.dtype]]) -> dict[_Description, int]:
    """Choose the rank that writes each shard: of those that hold it, the one with the least to write so far."""
    holders: dict[_Description, list[int]] = {}
    size: dict[_Description, int] = {}
    for rank, described in enumerate(ranks):
        for one, dtype in described.items():
            holders.setdefault(one, []).append(rank)
            size[one] = math.prod(one.size) * dtype.itemsize
    burden = [0] * len(ranks)
    writers = {}
    # Those with one holder have no choice; then the largest first. Every rank comes to the same result.
    for one in sorted(holders, key=lambda one: (len(holders[one]) > 1, -size[one], one)):
        writers[one] = min(holders[one], key=lambda rank: (burden[rank], rank))
        burden[writers[one]] += size[one]
    return writers


def _list(ranks: Sequence[dict[_Description, torch.dtype]]) -> dict[str, TensorStorageMetadata]:
    """List every tensor with its chunks."""
    tensors: dict[str, TensorStorageMetadata] = {}
    types = {one: dtype for described in ranks for one, dtype in described.items()}
    for one in sorted(types):
        entry = tensors.setdefault(
            one.key, TensorStorageMetadata(TensorProperties(types[one]), torch.Size(one.shape), [])
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.size)))
    for key, entry in tensors.items():
        elements = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if elements != math.prod(entry.size):
            raise EngineError(
                "The ranks together do not hold each part of the model exactly once.",
                where=key,
                why=f"they have {elements} of {math.prod(entry.size)} elements of {tuple(entry.size)}",
            )
    return tensors
