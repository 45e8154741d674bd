"""Check what vLLM's layers keep after an update of the weights. Runs in vLLM's processes, and imports no vLLM.

After loading, layers process weights for their kernels: they transpose experts, or split a projection into parts. The
reloading of vLLM (``model_loader/reload``) processes new weights in the same way and copies them into the old tensors,
which kernels and recorded graphs read. Code around it has broken this: experts were transposed when vLLM woke up
(vllm-ascend #12226), or processed by a trainer that vLLM had processed already (ms-swift #9828).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

OTHER_ENGINE = "set rollout.engine=transformers"


@dataclass(frozen=True)
class Place:
    """Where and how a parameter lies in memory.

    Attributes:
        shape: Sizes of its dimensions.
        strides: Distances between neighbours in each dimension, in elements.
        address: Address of its first element.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Return a tensor's place."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.data_ptr())


def places_of(model: nn.Module) -> dict[str, Place]:
    """Return the places of a model's parameters by name, without empty ones and without parameters on meta."""
    return {
        name: Place.of(parameter)
        for name, parameter in model.named_parameters()
        if parameter.numel() and not parameter.is_meta
    }


def check_places(model: nn.Module, before: Mapping[str, Place]) -> None:
    """Compare the places of parameters with earlier ones.

    Raises:
        EngineError: A parameter lies elsewhere, or in another layout: other code than vLLM's reloading has replaced it.
    """
    for name, new in places_of(model).items():
        if new != (old := before.get(name, new)):
            if (new.shape, new.strides) == (old.shape, old.strides):
                why = "it was replaced by another tensor, so that kernels may compute with the old one"
            else:
                why = (
                    f"its shape was {old.shape} with strides {old.strides}, and is {new.shape} with {new.strides} now: "
                    "something has transposed it"
                )
            raise EngineError(
                "A layer of vLLM no longer keeps its weights as it did after loading.",
                where=name,
                why=why,
                fix=OTHER_ENGINE,
            )


def check_latent_attention(model: nn.Module) -> None:
    """Compare the two parts of the projection ``kv_b_proj`` with which latent attention computes with the whole.

    The parts are tensors of their own, which no weight is loaded into: they are made anew after each update. Layers
    without the whole projection, or with parts in another format, are not compared.

    Raises:
        EngineError: A layer computes with parts of other weights.
    """
    for name, owner in _latent_attention(model):
        whole, values, keys = owner.kv_b_proj.weight, owner.W_UV, owner.W_UK_T  # [N*(P+V), L], [N, L, V], [N, P, L]
        heads, latent, width = values.shape
        if whole.dtype != values.dtype or whole.shape != (heads * (keys.shape[1] + width), latent):
            continue
        each = whole.view(heads, keys.shape[1] + width, latent)
        wanted = {"W_UK_T": each[:, : keys.shape[1]], "W_UV": each[:, keys.shape[1] :].transpose(1, 2)}
        for part, tensor in wanted.items():
            if not torch.equal(getattr(owner, part), tensor):
                raise EngineError(
                    "A layer of vLLM computes with other weights than were loaded.",
                    where=f"{name}.{part}",
                    why="vLLM made this tensor from kv_b_proj, but it differs from the kv_b_proj that was loaded",
                    fix=OTHER_ENGINE,
                )


def _latent_attention(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Find the objects that hold both parts: the layers, or what they compute with (``impl``)."""
    for name, layer in model.named_modules():
        for owner in (layer, getattr(layer, "impl", None)):
            parts = [getattr(owner, part, None) for part in ("W_UV", "W_UK_T")]
            whole = getattr(getattr(owner, "kv_b_proj", None), "weight", None)
            if all(isinstance(one, torch.Tensor) and one.ndim == 3 for one in parts) and whole is not None:
                yield name, owner
