"""Receive weights from a training engine, all of them, before any is used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from anytron.workers.weights.transfer import ReceivedWeights
    from anytron_vllm.expected_weights import ExpectedWeights

CHUNK_BYTES = 256 << 20
"""Of weights that a worker of vLLM in another process gets at a time."""


def put_together(received: ReceivedWeights) -> tuple[dict[str, Tensor], set[str]]:
    """Put pieces together, each of which is verified, in memory of this process.

    Returns:
        The tensors by name, and the names of those that may be left out.

    Raises:
        TransferError: They did not arrive as they were sent.
    """
    tensors: dict[str, Tensor] = {}
    optional = set()
    for piece in received:
        if piece.name not in tensors:
            tensors[piece.name] = torch.empty(math.prod(piece.shape), dtype=piece.values.dtype).view(piece.shape)
            if piece.optional:
                optional.add(piece.name)
        tensors[piece.name].view(-1)[piece.start : piece.start + piece.values.numel()] = piece.values
    return tensors, optional


def receive_all(received: ReceivedWeights, expected: ExpectedWeights) -> dict[str, Tensor]:
    """Receive all weights of a model.

    vLLM loads in place and cannot go back. For the old weights to stay in use until the last one of the new has
    arrived, these need memory of their own: on the host, as much as the model has.

    Args:
        received: What comes; each piece is verified.
        expected: What the model needs.

    Returns:
        The tensors by their Hugging Face names, without those that the model has no place for and may leave out.

    Raises:
        EngineError: A tensor is missing, unknown, or of another shape.
        TransferError: The weights did not arrive as they were sent.
    """
    weights, optional = put_together(received)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    loaded = expected.check(shapes, optional, f"version {received.version}")
    return {name: weights[name] for name in sorted(loaded)}


def chunks(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Split weights into parts of about :data:`CHUNK_BYTES`; a larger tensor is a part of its own."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if chunk and size + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = tensor
        size += tensor.nbytes
    yield chunk
