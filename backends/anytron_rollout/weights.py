"""Load weights from a training engine, and check all of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from anytron.base.errors import EngineError
from anytron.task.data.pretrained import turned_in_files

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from anytron.workers.weights.transfer import Piece, ReceivedWeights

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def load_verified(model: PreTrainedModel, weights: ReceivedWeights) -> None:
    """Copy received weights into a model, in place, piece by piece.

    Received pieces are verified already; a copy on a device is compared with its piece. A tensor of another dtype is
    cast first. Names are as in published checkpoints, which may differ from the modules' (:class:`Places`). Tied
    parameters (``tie_word_embeddings``) may arrive under one of their names or under all, with equal values. An
    optional tensor is ignored if the model has no tensor of that name.

    Args:
        model: A Hugging Face model.
        weights: All of its weights.

    Raises:
        EngineError: A tensor is missing, unknown, or has the wrong shape. The model must not be used afterwards.
        TransferError: Weights did not arrive as they were sent. The model must not be used afterwards.
    """
    places = Places(model)
    loaded: dict[str, Place] = {}
    owners: dict[tuple[int, torch.Size], str] = {}  # by address and shape: the first name whose values came
    for piece in weights:
        place = loaded.get(piece.name) or places.find(piece.name)
        if place is None:
            if piece.optional:
                continue
            refuse("is unknown to the model", piece.name, "the rollout's model has no such tensor", weights.version)
        target = place.tensor
        if piece.shape != target.shape:
            why = f"its shape is {piece.shape}, but the rollout's model has {tuple(target.shape)}"
            refuse("has the wrong shape", piece.name, why, weights.version)
        loaded[piece.name] = place
        first = owners.setdefault((target.data_ptr(), target.shape), piece.name) == piece.name
        if first:
            _fill(target, piece)
        if (target.device.type != "cpu" or not first) and not _holds(target, piece):
            why = "the device did not store the value that was sent"
            if not first:
                why = "this weight shares memory with another weight (they are tied), but their sent values differ"
            refuse("differs from the value that was sent", piece.name, why, weights.version)
    if missing := places.missing(loaded.values()):
        refuse("is missing", missing[0], f"{len(missing)} of the model's weights are missing", weights.version)


def differing_weights(model: PreTrainedModel, weights: ReceivedWeights) -> list[str]:
    """Compare a model's weights with received ones; names and casts are as in :func:`load_verified`.

    Returns:
        Names of tensors that differ in shape or bits, or that one side lacks.

    Raises:
        TransferError: Weights did not arrive as they were sent.
    """
    places = Places(model)
    found: dict[str, Place] = {}
    differing: dict[str, None] = {}
    for piece in weights:
        place = found.get(piece.name) or places.find(piece.name)
        if place is not None:
            found[piece.name] = place
            if piece.shape == place.tensor.shape and _holds(place.tensor, piece):
                continue
        elif piece.optional:
            continue
        differing[piece.name] = None
    return [*differing, *places.missing(found.values())]


class Place(NamedTuple):
    """The place of a checkpoint's tensor in a model.

    Attributes:
        module: A name in ``model.state_dict()``.
        tensor: That tensor, or the part of it that the checkpoint's tensor fills; writes to it change the model.
    """

    module: str
    tensor: Tensor


class Places:
    """Find which tensors of a model, or which parts of them, a checkpoint's tensors fill.

    The tensors of some families were published under other names than their modules have today: Qwen2.5-VL's
    ``visual.merger.ln_q.weight`` belongs to ``model.visual.merger.ln_q``. Mixtures of experts were published
    with a tensor for each expert, while modules have one for all experts of a layer. transformers has rules for both.
    Those of Qwen3-VL-MoE were published transposed.

    Args:
        model: A Hugging Face model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._turned = turned_in_files(model)
        rules = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    @property
    def modules(self) -> Collection[str]:
        """Names of the model's tensors."""
        return self._modules.keys()

    def find(self, name: str) -> Place | None:
        """Find the place of a tensor by its name in checkpoints or the model; None if there is no such tensor."""
        modules = self._modules
        if name not in modules:
            for rule in self._renamings:
                name, _ = rule.rename_source_key(name)
        if name in modules:
            return Place(name, modules[name].mT if name in self._turned else modules[name])
        for converter in self._converters:
            module, pattern = converter.rename_source_key(name)
            if pattern is not None and module in modules:
                part = _part(modules[module], converter, pattern, name)
                return None if part is None else Place(module, part)
        return None

    def missing(self, filled: Iterable[Place]) -> list[str]:
        """Return the names of the model's tensors that the given places do not fill.

        Tensors are compared by identity, because tied parameters have several names. A tensor that is filled in parts
        is missing unless the parts fill all of it.
        """
        parts: dict[int, dict[int, int]] = {}
        for place in filled:
            whole = parts.setdefault(id(self._modules[place.module]), {})
            whole[int(place.tensor.storage_offset())] = place.tensor.numel()
        return sorted(
            name for name, tensor in self._modules.items() if sum(parts.get(id(tensor), {}).values()) < tensor.numel()
        )


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


def _fill(target: Tensor, piece: Piece) -> None:
    for part, values in _paired(target, piece):
        part.copy_(values)


def _holds(target: Tensor, piece: Piece) -> bool:
    """Whether a tensor has the bytes of a piece in its place."""
    return all(_same_bits(part.to("cpu"), values.to(part.dtype)) for part, values in _paired(target, piece))


def _paired(target: Tensor, piece: Piece) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views that together are a piece's place in a tensor, each with its values in the same shape."""
    start = 0
    for part in _parts(target, piece.start, piece.start + piece.values.numel()):
        yield part, piece.values[start : start + part.numel()].view(part.shape)
        start += part.numel()


def _parts(target: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield views that together are the elements ``start`` to ``stop`` of a tensor, row-major.

    They are 1-D, or whole matrices of a tensor that is transposed.
    """
    if target.is_contiguous() or target.ndim == 1:
        yield target.view(-1)[start:stop]
        return
    if target.ndim == 2 and (start, stop) == (0, target.numel()):
        yield target
        return
    size = target[0].numel()
    for row in range(start // size, -(-stop // size)):
        yield from _parts(target[row], max(0, start - row * size), min(size, stop - row * size))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare tensors of one dtype as integers: NaN equals itself, and zeros of different signs differ."""
    one, other = one.contiguous().view(-1), other.contiguous().view(-1)
    size = one.element_size()
    wide = all((start * size) % 8 == 0 for start in (one.storage_offset(), other.storage_offset(), one.numel()))
    integer = torch.int64 if wide else _INTEGERS[size]
    return torch.equal(one.view(integer), other.view(integer))


def refuse(what: str, name: str, why: str, version: int) -> NoReturn:
    """Raise an error that names a weight.

    Args:
        what: The end of the sentence "A weight ...".
        name: Name of the weight.
        why: The cause.
        version: Number of updates after which the weights were sent.

    Raises:
        EngineError: Always.
    """
    raise EngineError(
        f"A weight {what}.",
        where=f"{name}, in the weights of version {version}",
        why=why,
        fix="install the versions of the libraries that constraints/ lists, and check the run with anytron verify",
    )
