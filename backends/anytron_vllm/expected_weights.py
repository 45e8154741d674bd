"""The tensors that a model needs, so that weights are refused before any of the old ones is overwritten.

vLLM takes a part of a model's weights without an error. What a model's weights are is known from transformers' class
of it, built without memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.base.errors import EngineError
from anytron.task.data.pretrained import load_hf_config, model_class
from anytron_rollout.weights import Places

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from anytron.config.schema import ModelSection


class ExpectedWeights:
    """Names and shapes of a model's weights, as its published checkpoints have them.

    Args:
        model: Which model.
    """

    def __init__(self, model: ModelSection) -> None:
        config = load_hf_config(model)
        with torch.device("meta"):
            self._places = Places(model_class(config).from_config(config))

    def check(self, shapes: Mapping[str, tuple[int, ...]], optional: Collection[str], where: str) -> set[str]:
        """Compare tensors with those of the model.

        Args:
            shapes: The tensors' shapes by name.
            optional: Names that are left out if the model has none of that name.
            where: Where the tensors come from, for the error.

        Returns:
            The names to load.

        Raises:
            EngineError: A tensor is missing, unknown, or of another shape.
        """
        places = {name: place for name in shapes if (place := self._places.find(name)) is not None}
        loaded = shapes.keys() - (set(optional) - places.keys())
        if unknown := sorted(loaded - places.keys()):
            _refuse("is unknown to the model", unknown[0], f"{len(unknown)} of {len(shapes)} are unknown", where)
        for name in sorted(loaded):
            if tuple(places[name].tensor.shape) != shapes[name]:
                why = f"{shapes[name]}, the model has {tuple(places[name].tensor.shape)}"
                _refuse("has another shape", name, why, where)
        if missing := self._places.missing(places[name] for name in loaded):
            _refuse("is missing", missing[0], f"{len(missing)} of the model's weights are missing", where)
        return loaded


def _refuse(what: str, name: str, why: str, where: str) -> None:
    raise EngineError(f"A weight {what}.", where=f"{name}, {where}", why=why)
