"""Read a checkpoint's tensors into a model's tensors, whatever the parallel sizes of the run that saved it."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from anytron.base.errors import EngineError
from anytron.base.files import exhausted
from anytron_megatron.checkpoint.rectangles import overlap
from anytron_megatron.checkpoint.unpickling import read_table_of_contents, read_tensor, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata

    from anytron_megatron.checkpoint.shards import SavedTensor, Shard

TABLE = ".metadata"
"""File with the table of contents: the names and shapes of the tensors, and the file and offset of each part."""


@torch.no_grad()
def load_tensors(tensors: Sequence[SavedTensor], directory: Path) -> None:
    """Read this rank's parts of the tensors, in place; the ranks do not communicate.

    Raises:
        EngineError: Tensors are missing or have another shape, or a file is damaged or names code to run.
    """
    table = read_table_of_contents(directory / TABLE)
    shards = [shard for one in tensors for shard in one.shards]
    _require_fit(shards, table, directory)
    wanted: dict[str, dict[tuple[int, int], list[tuple[Tensor, tuple[slice, ...]]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for shard in shards:
        for part, stored, source in _sources(shard, table, directory):
            wanted[stored.relative_path][stored.offset, stored.length].append((part, source))
    for name, reads in wanted.items():
        path = directory / name
        try:
            with path.open("rb") as file:
                for (offset, length), targets in sorted(reads.items(), key=lambda read: read[0]):
                    file.seek(offset)
                    found = read_tensor(path, io.BytesIO(file.read(length)))
                    for part, source in targets:
                        part.copy_(found[source])
        except (OSError, IndexError, RuntimeError) as error:
            raise exhausted(error, str(path)) or refusal(path, f"{type(error).__name__}: {error}") from error
    for one in tensors:
        one.complete()


def _sources(
    shard: Shard, table: Metadata, directory: Path
) -> Iterable[tuple[Tensor, _StorageInfo, tuple[slice, ...]]]:
    """Find what a shard consists of: part of it, where that is stored, and which part of what is stored there."""
    found, covered = [], 0
    size = tuple(shard.data.shape)
    for chunk in _entry(table, shard.key).chunks:
        shared = overlap(shard.offset, size, chunk.offsets, chunk.sizes)
        if shared is not None:
            part = shard.data[shared[0]]
            covered += part.numel()
            stored = table.storage_data.get(MetadataIndex(shard.key, chunk.offsets))
            if stored is None:
                raise refusal(directory / TABLE, f"it does not say where a part of {shard.key} is")
            found.append((part, stored, shared[1]))
    if shard.flexible:
        # What another layout did not pad is padding here.
        if covered < math.prod(size):
            shard.data.zero_()
    elif covered != math.prod(size):
        why = f"its parts of {shard.key} have {covered} of the {math.prod(size)} elements that a rank needs"
        raise refusal(directory / TABLE, why)
    return found


def _entry(table: Metadata, key: str) -> TensorStorageMetadata:
    entry = table.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), "the table was checked when it was read"
    return entry


def _require_fit(shards: Sequence[Shard], table: Metadata, directory: Path) -> None:
    """Refuse the checkpoint of another model, saying what differs."""
    found = {key: tuple(_entry(table, key).size) for key in table.state_dict_metadata}
    missing = sorted({shard.key for shard in shards} - found.keys())
    other = sorted(
        {
            f"{shard.key} has the shape {found[shard.key]}, but the model needs {shard.shape}"
            for shard in shards
            if shard.key in found and not _fits(shard, found[shard.key])
        }
    )
    if missing or other:
        reasons = [f"{len(missing)} tensors are missing, for example {missing[0]}"] if missing else []
        raise EngineError(
            "The checkpoint belongs to another model, or to a run that trains other parts of this model.",
            where=str(directory),
            why="; ".join([*reasons, *other[:3]]),
            fix="resume with the configuration that the run began with",
        )


def _fits(shard: Shard, shape: tuple[int, ...]) -> bool:
    return shape[1:] == shard.shape[1:] if shard.flexible else shape == shard.shape
