"""Collectives: what NCCL accepts and other backends do not."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


def substitutions() -> Iterator[Substitution]:
    """``torch.distributed.scatter``, if torch was built with distributed support."""
    if torch.distributed.is_available():
        scatter = _contiguous_scatter(torch.distributed.scatter)
        yield Substitution(torch.distributed, "scatter", scatter)
        yield Substitution(torch.distributed.distributed_c10d, "scatter", scatter)


def _contiguous_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send contiguous copies of the chunks.

    Gloo sends the memory behind a strided chunk in its storage order, so that a weight split along
    its second dimension arrives scrambled, in silence; NCCL's wrapper copies such chunks.
    """

    @functools.wraps(original)
    def scatter(tensor: Tensor, scatter_list: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        if scatter_list is not None:
            scatter_list = [chunk.contiguous() for chunk in scatter_list]
        return original(tensor, scatter_list, *args, **kwargs)

    return scatter
