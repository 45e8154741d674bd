"""Take weights from a training engine, and trust nothing that was not checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from anytron.errors import EngineError
from anytron.trainer.checksum import checksum

if TYPE_CHECKING:
    from torch import Tensor, nn

    from anytron.trainer.roles import WeightManifest


def load_verified(model: nn.Module, manifest: WeightManifest) -> None:
    """Copy the weights of a manifest into a model, in place.

    The bytes read are checked against the manifest before anything is changed, and the bytes in the
    model after copying. A tensor of another dtype is cast first. Parameters that the model ties
    (``tie_word_embeddings``) may come under one of their names or under all, with equal values.

    Args:
        model: A Hugging Face model.
        manifest: Names the file and the checksums.

    Raises:
        EngineError: The file cannot be read, or a tensor is missing, unknown, of another shape, or
            fails its checksum. The model must not be used then.
    """
    try:
        weights = load_file(manifest.path)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            "The weights cannot be read.", where=f"version {manifest.version}, {manifest.path}", why=str(error)
        ) from error
    targets: dict[str, Tensor] = dict(model.state_dict())
    _check_names(weights, targets, manifest)
    expected: dict[str, int] = {}
    for name, tensor in weights.items():
        target = targets[name]
        if tensor.shape != target.shape:
            _refuse("has another shape", name, f"{tuple(tensor.shape)}, the model has {tuple(target.shape)}", manifest)
        if (found := checksum(tensor)) != manifest.checksums[name]:
            _refuse("was damaged on its way", name, f"crc32 {found:08x}, not {manifest.checksums[name]:08x}", manifest)
        cast = tensor.to(target.dtype)
        expected[name] = manifest.checksums[name] if tensor.dtype == target.dtype else checksum(cast)
        target.copy_(cast)
    for name, crc in expected.items():
        if (found := checksum(targets[name])) != crc:
            why = f"crc32 {found:08x}, not {crc:08x}; a tied weight with two values reads so too"
            _refuse("is not what was loaded", name, why, manifest)


def _check_names(weights: dict[str, Tensor], targets: dict[str, Tensor], manifest: WeightManifest) -> None:
    if differing := sorted(weights.keys() ^ manifest.checksums.keys()):
        _refuse("is in the file or in the manifest, not in both", differing[0], f"{len(differing)} such", manifest)
    if unknown := sorted(weights.keys() - targets.keys()):
        _refuse("is unknown to the model", unknown[0], f"{len(unknown)} of {len(weights)} are unknown", manifest)
    present = {targets[name].data_ptr() for name in weights if targets[name].numel()}
    if missing := sorted(name for name, target in targets.items() if target.data_ptr() not in present):
        _refuse("is missing", missing[0], f"{len(missing)} of the model's {len(targets)} are missing", manifest)


def _refuse(what: str, name: str, why: str, manifest: WeightManifest) -> None:
    raise EngineError(f"A weight {what}.", where=f"{name}, version {manifest.version}, {manifest.path}", why=why)
