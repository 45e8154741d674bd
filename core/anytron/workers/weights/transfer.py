"""The transfer of weights from the training engine to a rollout engine: its common interface, and the transfer by file.

The transfer by stream is in :mod:`anytron.workers.weights.stream`. An engine does not depend on either: it sends to a
:class:`WeightDestination` and loads from a :class:`WeightOrigin`.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from anytron.base.errors import TransferError
from anytron.base.files import exhausted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

Sent = TypeVar("Sent", covariant=True)  # noqa: PLC0105 - a word, as in the signatures that use it
WeightPart = Literal["weights", "adapter"]
"""What is sent: all of the policy's weights, or only the adapters that ``model.lora`` trains."""


@dataclass(frozen=True)
class Piece:
    """One tensor, or a part of a tensor that is too large to be held as a whole.

    The pieces of a tensor arrive in order, from its first element to its last.

    Attributes:
        name: The tensor's Hugging Face name.
        shape: Shape of the whole tensor.
        start: Index of the piece's first element, row-major.
        values: Elements of the piece, 1-D, on the host: verified, and valid until the next piece is requested.
        optional: Whether a rollout engine may ignore the tensor if its model has no tensor of that name. Such tensors
            belong to modules for speculative decoding, which not every engine builds.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    optional: bool


class ReceivedWeights(Protocol):
    """Weights that a rollout engine receives."""

    @property
    def version(self) -> int:
        """Number of completed optimizer updates."""

    def __iter__(self) -> Iterator[Piece]:
        """Yield all pieces.

        Raises:
            TransferError: The weights did not arrive as they were sent. What has been loaded so far must not be used.
        """


class WeightOrigin(Protocol):
    """The place from which a rollout engine receives weights; plain data, which is sent to its process."""

    def open(self) -> AbstractContextManager[ReceivedWeights]:
        """Begin to receive.

        Raises:
            TransferError: There is nothing to receive.
        """


class WeightDestination(Protocol[Sent]):
    """The place to which the training engine's rank 0 sends weights; plain data, which is sent to its process."""

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int, is_optional: Callable[[str], bool]) -> Sent:
        """Send all weights.

        Args:
            weights: Tensors by their Hugging Face names; they may be views of parameters. Iterating is a collective, so
                all tensors are read even if no process receives them.
            version: Number of completed optimizer updates.
            is_optional: Function that returns, for a tensor's name, whether rollout engines may ignore the tensor
                (:attr:`Piece.optional`).

        Returns:
            The facts about the weights that the driver needs.
        """


@dataclass(frozen=True)
class WeightManifest:
    """Weights in a file: a :class:`WeightOrigin`.

    Attributes:
        path: safetensors file, readable by the rollout process.
        version: Number of completed optimizer updates.
        checksums: crc32 of each tensor's bytes, by Hugging Face name.
        optional: Names of tensors that rollout engines may ignore (:attr:`Piece.optional`).
    """

    path: str
    version: int
    checksums: Mapping[str, int]
    optional: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Size of the safetensors file."""
        return Path(self.path).stat().st_size

    @contextlib.contextmanager
    def open(self) -> Iterator[ReceivedWeights]:
        """Open the file.

        Raises:
            TransferError: The file cannot be read, or its names differ from the manifest.
        """
        from safetensors import SafetensorError, safe_open

        try:
            file = safe_open(self.path, "pt")
        except (OSError, SafetensorError) as error:
            raise exhausted(error, self._where) or TransferError(
                "The weights cannot be read.",
                where=self._where,
                why=str(error),
                fix="make sure that the rollout process can read this file",
            ) from error
        with file:
            names = set(file.keys())  # type: ignore[no-untyped-call]
            differing = sorted((names ^ self.checksums.keys()) | (self.optional - self.checksums.keys()))
            if differing:
                why = f"{len(differing)} weights are missing from the file or the manifest, for example {differing[0]}"
                raise TransferError(
                    "The file and its manifest do not list the same weights.",
                    where=self._where,
                    why=why,
                    fix="if this happens again, set rollout.weights=auto",
                )
            yield _FileContent(self.version, self._pieces(file.get_tensor))

    def _pieces(self, tensor_of: Callable[[str], Tensor]) -> Iterator[Piece]:
        for name, crc in self.checksums.items():
            tensor = tensor_of(name)
            if (found := checksum(tensor)) != crc:
                why = f"its crc32 is {found:08x}, but the manifest has {crc:08x}"
                raise TransferError(
                    "A weight was damaged in transfer.",
                    where=f"{name}, {self._where}",
                    why=why,
                    fix="if this happens again, check the disk of this file, or set rollout.weights=auto",
                )
            yield Piece(name, tuple(tensor.shape), 0, tensor.reshape(-1), name in self.optional)

    @property
    def _where(self) -> str:
        return f"version {self.version}, {self.path}"


@dataclass(frozen=True)
class _FileContent:
    version: int
    pieces: Iterator[Piece]

    def __iter__(self) -> Iterator[Piece]:
        return self.pieces


@dataclass(frozen=True)
class WeightFile:
    """A :class:`WeightDestination`: rank 0 gathers all weights and writes them to one file.

    Attributes:
        path: The safetensors file.
    """

    path: str

    def send(
        self, weights: Iterable[tuple[str, Tensor]], version: int, is_optional: Callable[[str], bool]
    ) -> WeightManifest:
        """Write the file."""
        from safetensors.torch import save_file

        tensors = {name: tensor.to("cpu").contiguous() for name, tensor in weights}
        save_file(tensors, self.path)
        checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
        return WeightManifest(self.path, version, checksums, frozenset(filter(is_optional, tensors)))


def checksum(tensor: Tensor) -> int:
    """Compute the crc32 of a tensor's bytes, row-major, as in a safetensors file."""
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data)
