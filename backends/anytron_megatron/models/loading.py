"""Load a model's weights, check that each tensor was read and each parameter filled, and freeze parts of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from anytron.base.errors import EngineError
from anytron.base.files import exhausted
from anytron.task.data.pretrained import INDEXER
from anytron_megatron.models.weight_files import listed
from anytron_megatron.models.weight_names import may_stay_unread, prediction_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from anytron.base.errors import ResourceError
    from anytron.config.schema import ModelPart
    from anytron.task.data.composites import TensorNames


_LOADING_FAILS = (KeyError, AssertionError, RuntimeError, ValueError, OSError, AttributeError, SafetensorError)
"""What mcore-bridge raises, from various places, when a tensor is missing or has another shape."""


def load_weights(bridge: Any, chunks: list[nn.Module], directory: Path, layers: int, names: TensorNames) -> None:
    """Read a Hugging Face directory into Megatron's parameters. A collective.

    mcore-bridge ignores tensors that the model lacks, and keeps random values in an output layer and in multi-token
    prediction modules that the files lack. So every parameter is first filled with NaN, and the tensors that were read
    are recorded.

    Args:
        bridge: The model's bridge from mcore-bridge.
        chunks: The model on this rank.
        directory: Directory with safetensors files.
        layers: Number of layers of the model, without its multi-token prediction modules.
        names: How the files name the model's tensors. Tensors of other models in the directory are not read.

    Raises:
        EngineError: On all ranks, if a tensor is missing, unknown or of another shape anywhere, or a file
            is damaged.
        ResourceError: On all ranks, if a rank has run out of file descriptors, or its disk fails.
    """
    with torch.no_grad():
        for parameter in _parameters(chunks):
            parameter.fill_(torch.nan)
    read = _Reading(names)
    failure: tuple[str, ResourceError | None] = "", None
    try:
        bridge.load_weights(chunks, str(directory), converter=read.note)
    except _LOADING_FAILS as error:
        failure = f"{type(error).__name__}: {error}", exhausted(error, str(directory))
    failures: list[tuple[str, ResourceError | None]] = _everywhere(failure)
    for _, known in failures:
        if known is not None:  # that a file cannot be opened says nothing about what is in it
            raise known
    if any(why for why, _ in failures):
        _refuse(directory, next(why for why, _ in failures if why), *_differences(bridge, chunks, read))
    if unfilled := {name for names in _everywhere(_unfilled(chunks)) for name in names}:
        why = f"{len(unfilled)} of Megatron's parameters got no finite values: {listed(sorted(unfilled))}"
        _refuse(directory, why, *_differences(bridge, chunks, read))
    unread = read.offered.keys() - set[str]().union(*_everywhere(read.taken))
    unread -= prediction_tensors(unread, layers)
    unknown = sorted(name for name in unread if not may_stay_unread(name) and not _tied_copy(bridge, name))
    if unknown:
        _refuse(
            directory, f"{len(unknown)} of {len(read.offered)} tensors do not belong to the model: {listed(unknown)}"
        )


def freeze(
    chunks: Sequence[torch.nn.Module], parts: Sequence[ModelPart], prefixes: Mapping[ModelPart, Sequence[str]]
) -> None:
    """Freeze parts of a model, before its gradient buffers and optimizer are built.

    Their parameters get no gradient and no optimizer state, and stay the same bit for bit.

    Args:
        chunks: The model on this rank.
        parts: Parts to freeze.
        prefixes: Prefixes of the names of each part's parameters. The longest matching prefix counts, because aligners
            are inside of vision towers.

    Raises:
        EngineError: A part has no parameters, on a rank that holds the vision tower.
    """
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    part_of_prefix = {prefix: part for part, several in prefixes.items() for prefix in several}
    found: set[ModelPart] = set()
    for name, parameter in named:
        matching = [prefix for prefix in part_of_prefix if name.startswith(prefix)]
        part = part_of_prefix[max(matching, key=len)] if matching else None
        if part is not None and part in parts:
            found.add(part)
            parameter.requires_grad_(False)
    missing = [part for part in parts if part not in found]
    if missing and any(getattr(chunk, "visual", None) is not None for chunk in chunks):
        raise EngineError(
            "A part to freeze has no parameters.",
            where="model.freeze",
            why=f"no parameter of this model belongs to {', '.join(missing)}",
            fix=f"remove {', '.join(missing)} from model.freeze",
        )


def freeze_indexers(chunks: Sequence[torch.nn.Module]) -> None:
    """Freeze the indexers of DeepSeek sparse attention.

    An indexer chooses keys, and a choice has no gradient: in transformers and here its parameters get none, and weight
    decay would be all that moves them. DeepSeek trains indexers with a loss of their own, which Anytron does not have.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if INDEXER in name:
                parameter.requires_grad_(False)


class _Reading:
    """Record which tensors the bridge was offered, and which it took."""

    def __init__(self, names: TensorNames) -> None:
        self._names = names
        self.offered: dict[str, Any] = {}
        self.taken: set[str] = set()

    def note(self, stored: str, tensor: Any) -> tuple[str, Any] | None:
        """Wrap a tensor that the bridge may read (``load_weights(converter=...)``); None if it is not the model's."""
        name = self._names.inner(stored)
        if name is None:
            return None
        self.offered[name] = tensor
        load, load_slice = tensor.load, tensor.load_slice

        def loading() -> Any:
            self.taken.add(name)
            return load()

        def slicing(slices: Any) -> Any:
            self.taken.add(name)
            return load_slice(slices)

        tensor.load, tensor.load_slice = loading, slicing
        return name, tensor


def _parameters(chunks: list[nn.Module]) -> Iterator[nn.Parameter]:
    for chunk in chunks:
        yield from (parameter for parameter in chunk.parameters() if parameter.is_floating_point())


def _unfilled(chunks: list[nn.Module]) -> list[str]:
    named = (pair for chunk in chunks for pair in chunk.named_parameters())
    return [name for name, value in named if value.is_floating_point() and not bool(torch.isfinite(value).all())]


def _everywhere(value: Any) -> list[Any]:
    """Gather a value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _tied_copy(bridge: Any, name: str) -> bool:
    return name == bridge.hf_lm_head_key and not bridge.config.untie_embeddings_and_output_weights


def _differences(bridge: Any, chunks: list[nn.Module], read: _Reading) -> Iterator[str]:
    """Compare the files with what the model would export. A collective, called only after a failure."""
    exported = bridge.export_weights(chunks, target_device="cpu", only_master_rank=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in exported if tensor is not None}
    absent = sorted(shapes.keys() - read.offered.keys())
    if absent:
        yield f"{len(absent)} of the model's {len(shapes)} tensors are missing: {listed(absent)}"
    differing = []
    for name in sorted(shapes.keys() & read.offered.keys()):
        try:
            found = tuple(read.offered[name].load().shape)
        except (OSError, SafetensorError):
            continue
        if found != shapes[name]:
            differing.append(f"{name} has {found}, but the model needs {shapes[name]}")
    if differing:
        yield f"{len(differing)} tensors have a different shape: {listed(differing)}"


def _refuse(directory: Path, *reasons: str) -> None:
    raise EngineError(
        "The weights do not match the model.",
        where=str(directory),
        why="; ".join(reasons),
        fix="use the weights that belong to this config.json, or complete the download",
    )
