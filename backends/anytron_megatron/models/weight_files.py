"""Check the files of a model's weights by their headers, in milliseconds. Imports no Megatron."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.config.diagnostics import Diagnostic
from anytron.task.data.composites import TensorNames
from anytron.task.data.model_files import read_object, tensor_names
from anytron.task.data.weight_headers import DamagedFileError, read_header
from anytron_megatron.models.families import family_of
from anytron_megatron.models.weight_names import (
    LM_HEAD,
    may_stay_unread,
    prediction_tensors,
    published_name,
    with_score_head,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from anytron_megatron.models.weight_names import Shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files that mcore-bridge looks for (mcore_bridge/utils/safetensors.py); if both exist, it uses the index."""
_DOWNLOAD = "complete the download"
_PACKED = ".weight_packed"
"""End of the names of weights that compressed-tensors has packed, such as Kimi-K2.5's experts."""


def weight_diagnostics(
    key: str, directory: Path, config: Mapping[str, Any], *, scores: bool = False
) -> Iterator[Diagnostic]:
    """Check the headers of safetensors files against their index and the contents of ``config.json``.

    Args:
        key: The configuration key that names the directory.
        directory: Model directory.
        config: The model's whole Hugging Face config.
        scores: Whether it is a reward model, which has a scoring head.

    Yields:
        Errors: weights in a format that mcore-bridge does not read; files that are missing, damaged or cut short;
        tensors that are missing, unknown or of another shape, all of them counted and the first ones named. Names and
        shapes are checked for the families with ``layer`` in :mod:`anytron_megatron.models.families`; the training
        ranks check other families. A directory without any weights is not reported here: the core's checks do that.
    """
    for message, fix in _faults(directory, config, scores=scores):
        yield Diagnostic("error", key, message, fix)


def stored_shapes(directory: Path) -> Shapes | None:
    """Read names and shapes of all tensors of a directory; None if a file is damaged, which other checks report."""
    shapes: Shapes = {}
    try:
        for name in _files(directory)[0]:
            shapes |= read_header(directory / name)
    except DamagedFileError:
        return None
    return shapes


def _faults(directory: Path, config: Mapping[str, Any], *, scores: bool) -> Iterator[tuple[str, str]]:
    """What is wrong with the weights, and the fix."""
    readable = any((directory / name).is_file() for name in (SINGLE, INDEX))
    if not readable and any(found for pattern in ("*.safetensors", "*.bin") for found in directory.glob(pattern)):
        message = f"mcore-bridge reads {SINGLE} or {INDEX}, and {directory} has neither"
        yield message, "convert the weights: load the model with transformers and save it with save_pretrained"
    files, faults = _files(directory)
    shapes: dict[str, tuple[int, ...]] = {}
    inner = (tensor_names(directory) if config else TensorNames()).inner
    for name, wanted in files.items():
        try:
            found = read_header(directory / name)
        except DamagedFileError as error:
            faults.append((f"{name}: {error}", _DOWNLOAD))
            continue
        if absent := sorted(wanted - found.keys()):
            faults.append((f"{name} lacks {listed(absent)}, which should be in it by {INDEX}", _DOWNLOAD))
        shapes |= {published_name(own): shape for name, shape in found.items() if (own := inner(name)) is not None}
    yield from faults
    family = family_of(config)
    expected = None if family is None else family.tensors(config)
    expected = with_score_head(expected) if expected and scores else expected
    # Without all headers every tensor of a damaged file would be called missing.
    if faults or expected is None or not files:
        return
    if packed := sorted(name for name in shapes if name.endswith(_PACKED)):
        message = f"{len(packed)} weights are packed integers, which mcore-bridge does not read: {listed(packed)}"
        yield message, "use bfloat16 weights of this model, and remove quantization_config from its config.json"
        return
    modules = prediction_tensors(shapes, (config.get("text_config") or config)["num_hidden_layers"])
    own = "use the weights that belong to this config.json"
    if absent := sorted(expected.keys() - shapes.keys()):
        yield f"{len(absent)} of the model's {len(expected)} tensors are missing: {listed(absent)}", own
    if unknown := sorted(name for name in shapes.keys() - expected.keys() - modules if not _allowed(name, config)):
        yield f"{len(unknown)} of {len(shapes)} tensors do not belong to the model: {listed(unknown)}", own
    differing = sorted(name for name in expected.keys() & shapes.keys() if expected[name] != shapes[name])
    if differing:
        first = differing[0]
        message = (
            f"{len(differing)} of {len(shapes)} tensors have a different shape: {listed(differing)} "
            f"({first} has {shapes[first]}, the config says {expected[first]})"
        )
        yield message, own


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first few names, joined by commas."""
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _files(directory: Path) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
    """File names with the tensors that the index expects in each, and what is wrong with the index."""
    if not (directory / INDEX).is_file():
        return ({SINGLE: set()} if (directory / SINGLE).is_file() else {}), []
    try:
        index = _weight_map(directory)
    except ConfigError as error:
        return {}, [(f"{INDEX} cannot be read: {error.why}", error.fix)]
    files: dict[str, set[str]] = {}
    for tensor, name in sorted(index.items(), key=itemgetter(1)):
        files.setdefault(name, set()).add(tensor)
    absent = [name for name in files if not (directory / name).is_file()]
    if not absent:
        return files, []
    fault = (f"{len(absent)} of {len(files)} files in {INDEX} are missing: {listed(absent)}", _DOWNLOAD)
    return {name: tensors for name, tensors in files.items() if name not in absent}, [fault]


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensors with their files, which lie in the directory itself.

    Raises:
        ConfigError: The index is malformed, or names anything but a file of the directory.
    """
    index = read_object(directory / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ConfigError(
            f"The index {INDEX} is malformed.",
            why="its weight_map does not map each tensor to a file",
            fix="copy or download this file again",
        )
    if outside := sorted(name for name in set(index.values()) if Path(name).name != name or "\0" in name):
        why = f"{outside[0]!r:.60} is not a plain file name, and weight files must be in the model directory itself"
        raise ConfigError(
            f"The index {INDEX} names a file outside of the model directory.",
            why=why,
            fix="correct the file names in the index",
        )
    return index


def _allowed(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor may stand beside the expected ones."""
    tied_copy = config.get("tie_word_embeddings") and name == LM_HEAD
    return bool(tied_copy) or may_stay_unread(name)
