"""Decide which rank writes which tensors, and write this rank's part while training goes on.

An asynchronous save copies what this rank writes to host memory and hands the copy to a thread. It is a thread and not
a process: forking does not copy the threads of gloo and of the device, so that their locks may stay locked and a forked
child hangs now and then; a spawned child would have to import torch and get the state through shared memory, a second
copy. The thread spends its time in ``write``, ``fsync`` and SHA-256, which all release Python's lock. Collectives
belong to the training thread alone: the writing thread makes none, and the ranks find out whether all are done in
:meth:`anytron_megatron.checkpoint.checkpoints.Checkpoints.written_files`.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import Self

from anytron.base.errors import EngineError
from anytron.base.files import sync
from anytron.record.checkpoint.manifest import FileRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from typing_extensions import Buffer

    from anytron.device.runtime import DeviceRuntime
    from anytron_megatron.checkpoint.shards import Shard


@dataclass(frozen=True)
class WritePlan:
    """The tensors that one rank writes.

    Attributes:
        tensors: The tensors, not copies, each with its key and offset in the checkpoint.
        table: The table of contents of the whole checkpoint, without places in files; the same on every rank.
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
    """Divide the writing as evenly as possible between ranks that hold the same tensors. A collective.

    Raises:
        EngineError: The ranks together do not hold each element exactly once.
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
    """Choose the rank that writes each shard: of the ranks that hold it, the one with the least to write so far."""
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
                why=f"the ranks' parts of this tensor add up to {elements} elements, but the tensor has "
                f"{math.prod(entry.size)}, {tuple(entry.size)}",
                fix="report this as a bug of Anytron, with the run's configuration",
            )
    return tensors


class RecordedFile:
    """Context manager of a new file that is hashed while it is written and is on disk once :meth:`finish` returns.

    If writing fails, :meth:`write` only stores the error, and :meth:`check` raises it. If :meth:`write` raised it, the
    error would pass through torch's archive writer, whose destructor may then end the process.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._size = 0
        self._error: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # buffered data of a file that failed; finish() has closed the others
            self._file.close()

    def write(self, data: Buffer) -> int:
        """Write data and hash them."""
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self._error = error
        self._hash.update(view)
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing; :meth:`finish` flushes the file."""

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def check(self) -> None:
        """Raise the error that :meth:`write` has stored, if any.

        Raises:
            OSError: A write failed.
        """
        if self._error is not None:
            raise self._error

    def finish(self) -> FileRecord:
        """Flush the file to disk and close it; return its size and SHA-256.

        Raises:
            OSError: The data could not be written.
        """
        self.check()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._hash.hexdigest())


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a small file; it is on disk on return.

    Raises:
        OSError: The data could not be written.
    """
    with RecordedFile(path) as file:
        file.write(content)
        return file.finish()


class HostCopies:
    """Copies of tensors in host memory, so that training may go on and change the tensors.

    The memory is reused for later saves: the first access to new pages costs more than the copy, and pinning
    costs much more.

    Args:
        runtime: The device.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._kept: dict[MetadataIndex, Tensor] = {}

    def of(self, tensors: Iterable[tuple[MetadataIndex, Tensor]]) -> list[tuple[MetadataIndex, Tensor]]:
        """Copy tensors, each with its place in the checkpoint. The copies are valid until the next call."""
        pinned = self._runtime.can_pin_memory()
        copies = {}
        for index, tensor in tensors:
            copy = self._kept.get(index)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            copies[index] = copy.copy_(tensor, non_blocking=pinned)
        self._runtime.synchronize()
        self._kept = copies
        return list(copies.items())


class PartWriter:
    """Writes one rank's part of a checkpoint, in a thread (:meth:`start`) or at once (:meth:`run`).

    Args:
        directory: Directory of the checkpoint.
        name: Name of the file that gets the tensors.
        tensors: Tensors of this rank to save, each with its place in the table of contents.
        files: Contents of small files to write as well, by name.

    Attributes:
        stored: Place of each written tensor in the file.
        records: Size and SHA-256 of each written file, by name.
        error: The exception that ended writing; None if there was none.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        tensors: Iterable[tuple[MetadataIndex, Tensor]],
        files: Mapping[str, bytes],
    ) -> None:
        self._directory = directory
        self._name = name
        self._tensors = tensors
        self._files = files
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.stored: dict[MetadataIndex, Any] = {}
        self.records: dict[str, FileRecord] = {}

    def start(self) -> None:
        """Begin to write in a thread; when :meth:`done` returns True, :attr:`error` holds the error, if any."""
        self._thread = threading.Thread(target=self.run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Write the files; store an exception in :attr:`error` instead of raising it."""
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
            self.error = error
        self._tensors = ()

    def done(self) -> bool:
        """Whether writing is over, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when writing is over."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        self.records = {name: write_file(self._directory / name, content) for name, content in self._files.items()}
        with RecordedFile(self._directory / self._name) as file:
            for index, tensor in self._tensors:
                offset = file.tell()
                torch.save(_alone(tensor), file)  # type: ignore[arg-type]  # it writes, tells and flushes, no more
                file.check()
                self.stored[index] = _StorageInfo(self._name, offset, file.tell() - offset)
            self.records[self._name] = file.finish()
        sync(self._directory)


def _alone(tensor: Tensor) -> Tensor:
    """Bring a tensor to the host, in its own storage: ``torch.save`` writes whole storages."""
    host = tensor.detach().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.numel() * host.element_size() else host.clone()
