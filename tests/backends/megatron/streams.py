"""Take weights from real ranks through shared memory, as a rollout process does."""

import torch

from anytron.workers.weights.memory import SharedMemory
from anytron.workers.weights.stream import WeightStream


def streamed(workers, folder, *, bucket_bytes=4096, part="weights"):
    """Export through a stream of small buckets.

    Returns:
        Whole tensors by name, the names that are optional, and the version.
    """
    memory = SharedMemory(str(folder / "stream"))
    stream = WeightStream(memory, 1, 60.0, bucket_bytes)
    export = workers.group.submit(f"export_{part}", stream)
    parts, shapes, optional = {}, {}, set()
    with stream.origin(memory, 0).open() as weights:
        for piece in weights:
            parts.setdefault(piece.name, []).append(piece.values.clone())
            shapes[piece.name] = piece.shape
            if piece.optional:
                optional.add(piece.name)
    (sent,) = (found for found in export.result() if found is not None)
    size = sum(part.nbytes for found in parts.values() for part in found)
    assert (sent.version, sent.num_bytes) == (weights.version, size)
    return {name: torch.cat(found).reshape(shapes[name]) for name, found in parts.items()}, optional, weights.version


def assert_equals_file(workers, folder, part="weights"):
    """Check that a stream gives bit for bit what the file gives."""
    from safetensors.torch import load_file

    manifest = workers.export_weights(str(folder / "weights.safetensors"), part)
    expected = load_file(manifest.path)
    found, optional, version = streamed(workers, folder, part=part)
    assert (version, optional) == (manifest.version, manifest.optional)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert list(folder.glob("stream*")) == []
