"""Take weights from a training engine, and trust nothing that was not checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from anytron.errors import EngineError
from anytron.trainer.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from anytron.trainer.roles import WeightManifest


def load_verified(model: PreTrainedModel, manifest: WeightManifest) -> None:
    """Copy the weights of a manifest into a model, in place.

    The bytes read are checked against the manifest before anything is changed, and the bytes in the
    model after copying. A tensor of another dtype is cast first. Names are those of the published
    checkpoints, which are not always those of the modules (:func:`module_names`). Parameters that the
    model ties (``tie_word_embeddings``) may come under one of their names or under all, with equal values.

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
    modules = model.state_dict()
    named = module_names(model, weights)
    _check_names(weights.keys(), named, modules, manifest)
    targets = {name: modules[named[name]] for name in weights}
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


def module_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Find what a model calls the tensors of a checkpoint.

    Some families were published under other names than their modules have today: Qwen2.5-VL's
    ``visual.merger.ln_q.weight`` belongs to ``model.visual.merger.ln_q``. transformers keeps the rules.

    Args:
        model: A Hugging Face model.
        names: Names of a checkpoint, or of modules, which stay as they are.

    Returns:
        The name in ``model.state_dict()`` for each; a name that means nothing to the model comes out
        as some name that it does not have.
    """
    known = model.state_dict().keys()
    renamings = [
        rule for rule in get_model_conversion_mapping(model, add_legacy=False) if isinstance(rule, WeightRenaming)
    ]

    def rename(name: str) -> str:
        if name not in known:
            for rule in renamings:
                name, _ = rule.rename_source_key(name)
        return name

    return {name: rename(name) for name in names}


def _check_names(
    given: Iterable[str], named: Mapping[str, str], modules: Mapping[str, Tensor], manifest: WeightManifest
) -> None:
    if differing := sorted(set(given) ^ manifest.checksums.keys()):
        _refuse("is in the file or in the manifest, not in both", differing[0], f"{len(differing)} such", manifest)
    if unknown := sorted(name for name, module in named.items() if module not in modules):
        _refuse("is unknown to the model", unknown[0], f"{len(unknown)} of {len(named)} are unknown", manifest)
    present = {modules[module].data_ptr() for module in named.values() if modules[module].numel()}
    if missing := sorted(name for name, target in modules.items() if target.data_ptr() not in present):
        _refuse("is missing", missing[0], f"{len(missing)} of the model's {len(modules)} are missing", manifest)


def _refuse(what: str, name: str, why: str, manifest: WeightManifest) -> None:
    raise EngineError(f"A weight {what}.", where=f"{name}, version {manifest.version}, {manifest.path}", why=why)
