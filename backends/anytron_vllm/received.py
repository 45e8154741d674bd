"""Read weights from a training engine, and verify all of them before any is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from anytron.engines.weights import checksum
from anytron.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from anytron.engines.weights import WeightManifest
    from anytron_vllm.expected_weights import ExpectedWeights

CHUNK_BYTES = 256 << 20
"""Of weights that a worker of vLLM in another process gets at a time."""


def read_verified(manifest: WeightManifest, expected: ExpectedWeights) -> dict[str, Tensor]:
    """Read all weights.

    Args:
        manifest: Where they are, and their checksums.
        expected: What the model needs.

    Returns:
        The tensors by their Hugging Face names, without those that the model has no place for and may leave out.

    Raises:
        EngineError: They cannot be read, or one is missing, unknown, of another shape, or fails its checksum.
    """
    where = f"version {manifest.version}, {manifest.path}"
    try:
        weights = load_file(manifest.path)
    except (OSError, SafetensorError) as error:
        raise EngineError("The weights cannot be read.", where=where, why=str(error)) from error
    if differing := sorted(weights.keys() ^ manifest.checksums.keys()):
        why = f"{len(differing)} such; the first is {differing[0]}"
        raise EngineError("A weight is in the file or in the manifest, not in both.", where=where, why=why)
    loaded = expected.check({name: tuple(one.shape) for name, one in weights.items()}, manifest.optional, where)
    for name in loaded:
        if (found := checksum(weights[name])) != manifest.checksums[name]:
            why = f"crc32 {found:08x}, not {manifest.checksums[name]:08x}"
            raise EngineError("A weight was damaged in transfer.", where=f"{name}, {where}", why=why)
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
