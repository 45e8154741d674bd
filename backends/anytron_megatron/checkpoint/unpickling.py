"""Read the pickles of a checkpoint without running code.

``torch_dist`` keeps its table of contents, ``.metadata``, as a pickle, and each tensor in torch's own format. A pickle
can name any function of any module and have it called; the unpickler here accepts the few classes of a table of
contents only, and refuses all others before they are imported. Tensors go through ``torch.load`` with
``weights_only=True``, torch's own restricted unpickler. No other pickle is ever read: entries that are not tensors are
refused, and so are files outside of the checkpoint.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from anytron.base.errors import EngineError

_CLASSES = (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)


def _member_of(owner: object, name: str) -> _MEM_FORMAT_ENCODING:
    """Replace ``getattr``, with which Python 3.11.0 to 3.11.3 pickle members of enumerations, such as a table's.

    Raises:
        UnpicklingError: The pickle names anything else.
    """
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(
            f"it reads the attribute {name!r} of {owner!r}, which no checkpoint of Anytron does"
        )
    return _MEM_FORMAT_ENCODING[name]


_TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
ALLOWED: dict[tuple[str, str], Any] = {
    **{(known.__module__, known.__name__): known for known in _CLASSES},
    **{("torch", name): getattr(torch, name) for name in _TYPES},
    ("builtins", "getattr"): _member_of,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
"""Everything that a table of contents may name, by module and name."""


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = ALLOWED.get((module_name, global_name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint of Anytron does")
        return found


def read_table_of_contents(file: Path) -> Metadata:
    """Read ``.metadata`` and check every field that reading tensors depends on.

    Raises:
        EngineError: The file names a forbidden class or function, or does not describe tensors of this checkpoint.
    """
    try:
        with file.open("rb") as stream:
            table = _Unpickler(stream).load()
    # What a damaged pickle raises depends on where the damage is.
    except Exception as error:
        raise refusal(file, str(error) or type(error).__name__) from error
    if not isinstance(table, Metadata) or not all(
        isinstance(part, dict) for part in (table.state_dict_metadata, table.storage_data)
    ):
        raise refusal(file, "it is not a table of contents")
    for name, entry in table.state_dict_metadata.items():
        _check_entry(file, name, entry)
    for index, stored in table.storage_data.items():
        _check_place(file, index, stored)
    return table


def _check_entry(file: Path, name: object, entry: object) -> None:
    """Refuse a value that is not a tensor with a shape."""
    if not isinstance(entry, TensorStorageMetadata):
        raise refusal(file, f"{name} is not a tensor: reading it would need unpickling")
    sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
    if not all(isinstance(size, torch.Size) and len(size) == len(entry.size) for size in sizes):
        raise refusal(file, f"it does not say which shape {name} has")


def _check_place(file: Path, index: object, stored: object) -> None:
    """Refuse a value that is not a part of a file of this checkpoint."""
    if not isinstance(index, MetadataIndex) or not isinstance(stored, _StorageInfo):
        raise refusal(file, "it does not say where its tensors are")
    if not all(type(number) is int and number >= 0 for number in (stored.offset, stored.length)):
        raise refusal(file, f"it does not say where {index.fqn} is")
    if stored.relative_path != Path(str(stored.relative_path)).name:
        raise refusal(file, f"{index.fqn} is outside of the checkpoint, in {stored.relative_path!r}")
    if getattr(stored, "transform_descriptors", None):
        raise refusal(file, f"{index.fqn} is stored in an encoded form (transform_descriptors)")


def read_tensor(file: Path, stream: BinaryIO) -> torch.Tensor:
    """Read one tensor from a part of a checkpoint, onto the host.

    Raises:
        EngineError: The data are damaged, are not a tensor, or name a class or function that a tensor does not need.
    """
    try:
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
    # What a damaged archive raises depends on where the damage is.
    except Exception as error:
        raise refusal(file, str(error) or type(error).__name__) from error
    if not isinstance(tensor, torch.Tensor):
        raise refusal(file, f"it holds a {type(tensor).__name__} in place of a tensor")
    return tensor


def refusal(file: Path, why: str) -> EngineError:
    """Return the error for a checkpoint file that cannot be read."""
    return EngineError(
        "The checkpoint is damaged, or was not written by Anytron.",
        where=str(file),
        why=why,
        fix="resume from another checkpoint (anytron checkpoint list, anytron checkpoint verify)",
    )
