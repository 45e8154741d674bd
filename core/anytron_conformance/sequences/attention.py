"""The platform's attention on a micro-batch, called as engines call it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.kernels.contract import AttentionSpec
from anytron.proof.checks import Inapplicable
from anytron.sequences import scopes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron.base.traits import ModelTraits
    from anytron_conformance.micro_batches import MicroBatch
    from anytron_conformance.subject import Subject

    Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

HEADS = (4, 2)
"""Of queries, and of keys and values."""
SIZE = 16
SCALE = 0.3


def operands(total: int) -> list[Tensor]:
    """Queries, keys and values of all tokens, float32 ``[T, H, D]`` on the host."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, heads, SIZE, generator=generator) for heads in (HEADS[0], HEADS[1], HEADS[1])]


def attention_of(subject: Subject, batch: MicroBatch, traits: ModelTraits) -> Attend:
    """A layer of a model: the kernel, with the mask that the engine hands it, in the scope of the micro-batch.

    ``[R, C, H, D]`` -> ``[R, C, H, Dv]``.

    Raises:
        Inapplicable: The model's modules are a vendor's, which call their own attention.
    """
    if not subject.platform.portable_modules:
        raise Inapplicable(
            "the platform's modules are a vendor's, which call their own attention; levels model and on see it"
        )
    spec = AttentionSpec(*HEADS, SIZE, SIZE, SCALE, traits, device_type=subject.runtime.device_type)
    kernel = subject.hooks.attention_kernel(spec)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with scopes.enter(batch.scope):
            if batch.layout.format == "thd":
                return kernel(query[0], key[0], value[0], batch.call())[None]
            return kernel(query, key, value, batch.call())

    return attend
