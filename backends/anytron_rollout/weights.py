"""Load weights from a training engine, and check all of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from anytron.engines.weights import checksum
from anytron.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from anytron.engines.weights import WeightManifest


def load_verified(model: PreTrainedModel, manifest: WeightManifest) -> None:
    """Copy the weights of a manifest into a model, in place.

    It compares the bytes that it reads with the manifest before it changes a tensor, and the bytes in the model
    after copying. A tensor of another dtype is cast first. Names are those of published checkpoints, which may
    differ from the modules' (:func:`find_places`). Tied parameters (``tie_word_embeddings``) may come under one of
    their names or under all, with equal values. A tensor that the manifest calls optional is left out if the
    model has none of that name.

    Args:
        model: A Hugging Face model.
        manifest: The file and the checksums.

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
    _check_manifest(weights.keys(), manifest)
    places = find_places(model, weights)
    left_out = manifest.optional - places.keys()
    weights = {name: tensor for name, tensor in weights.items() if name not in left_out}
    _check_names(weights.keys(), places, model.state_dict(), manifest)
    targets = {name: places[name].tensor for name in weights}
    expected: dict[str, int] = {}
    for name, tensor in weights.items():
        target = targets[name]
        if tensor.shape != target.shape:
            _refuse("has another shape", name, f"{tuple(tensor.shape)}, the model has {tuple(target.shape)}", manifest)
        if (found := checksum(tensor)) != manifest.checksums[name]:
            _refuse("was damaged in transfer", name, f"crc32 {found:08x}, not {manifest.checksums[name]:08x}", manifest)
        cast = tensor.to(target.dtype)
        expected[name] = manifest.checksums[name] if tensor.dtype == target.dtype else checksum(cast)
        target.copy_(cast)
    for name, crc in expected.items():
        if (found := checksum(targets[name])) != crc:
            why = f"crc32 {found:08x}, not {crc:08x}; a tied weight with two different values also causes this"
            _refuse("differs from what was loaded", name, why, manifest)


class Place(NamedTuple):
    """The place of a checkpoint's tensor in a model.

    Attributes:
        module: A name in ``model.state_dict()``.
        tensor: That tensor, or the part of it that the checkpoint's tensor fills; writes to it change the model.
    """

    module: str
    tensor: Tensor


def find_places(model: PreTrainedModel, names: Iterable[str]) -> dict[str, Place]:
    """Find which tensors of a model, or which parts of them, a checkpoint's tensors fill.

    Some families were published under other names than their modules have today: Qwen2.5-VL's
    ``visual.merger.ln_q.weight`` belongs to ``model.visual.merger.ln_q``. And mixtures of experts were published
    with a tensor for each expert, while modules have one for all experts of a layer. transformers has the rules.

    Args:
        model: A Hugging Face model.
        names: Names of a checkpoint's tensors, or of modules; those of modules stay as they are.

    Returns:
        The place of each tensor that the model has.
    """
    modules: dict[str, Tensor] = dict(model.state_dict())
    rules = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def find(name: str) -> Place | None:
        if name not in modules:
            for rule in renamings:
                name, _ = rule.rename_source_key(name)
        if name in modules:
            return Place(name, modules[name])
        for converter in converters:
            module, pattern = converter.rename_source_key(name)
            if pattern is not None and module in modules:
                part = _part(modules[module], converter, pattern, name)
                return None if part is None else Place(module, part)
        return None

    return {name: place for name in names if (place := find(name)) is not None}


def _part(whole: Tensor, converter: WeightConverter, pattern: str, name: str) -> Tensor | None:
    """View the part of a module's tensor that the checkpoint's tensor ``name`` fills.

    None for a converter that does more than stack and concatenate, and for an expert that does not exist.
    """
    expert = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    for operation in reversed(converter.operations):
        if isinstance(operation, Concatenate):
            sources = converter.source_patterns
            size = whole.shape[operation.dim] // len(sources)
            whole = whole.narrow(operation.dim, sources.index(pattern) * size, size)
        elif isinstance(operation, MergeModulelist) and expert and int(expert[1]) < whole.shape[operation.dim]:
            whole = whole.select(operation.dim, int(expert[1]))
        else:
            return None
    return whole


def _check_manifest(given: Iterable[str], manifest: WeightManifest) -> None:
    differing = sorted((set(given) ^ manifest.checksums.keys()) | (manifest.optional - manifest.checksums.keys()))
    if differing:
        _refuse("is in the file or in the manifest, not in both", differing[0], f"{len(differing)} such", manifest)


def _check_names(
    given: Iterable[str], places: Mapping[str, Place], modules: Mapping[str, Tensor], manifest: WeightManifest
) -> None:
    given = set(given)
    if unknown := sorted(given - places.keys()):
        _refuse("is unknown to the model", unknown[0], f"{len(unknown)} of {len(given)} are unknown", manifest)
    # By address, because tied parameters have several names. The parts of a tensor must fill it.
    filled: dict[int, dict[int, int]] = {}
    for place in places.values():
        parts = filled.setdefault(modules[place.module].data_ptr(), {})
        parts[place.tensor.data_ptr()] = place.tensor.numel()
    if missing := sorted(
        name for name, whole in modules.items() if sum(filled.get(whole.data_ptr(), {}).values()) < whole.numel()
    ):
        _refuse("is missing", missing[0], f"{len(missing)} of the model's {len(modules)} are missing", manifest)


def _refuse(what: str, name: str, why: str, manifest: WeightManifest) -> None:
    raise EngineError(f"A weight {what}.", where=f"{name}, version {manifest.version}, {manifest.path}", why=why)
