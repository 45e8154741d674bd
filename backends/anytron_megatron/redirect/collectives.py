"""Let collectives of other backends accept what NCCL accepts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


def substitutions() -> Iterator[Substitution]:
    """Replace ``torch.distributed.scatter`` and ``all_gather``, if torch was built with distributed support."""
    if torch.distributed.is_available():
        scatter = _contiguous_scatter(torch.distributed.scatter)
        all_gather = _uneven_all_gather(torch.distributed.all_gather)
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            yield Substitution(module, "scatter", scatter)
            yield Substitution(module, "all_gather", all_gather)


def _contiguous_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send contiguous copies of the chunks.

    Gloo sends a strided chunk in the order of its storage, so that a weight split along its second dimension
    arrives scrambled, without an error. NCCL's wrapper copies such chunks.
    """

    @functools.wraps(original)
    def scatter(tensor: Tensor, scatter_list: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        if scatter_list is not None:
            scatter_list = [chunk.contiguous() for chunk in scatter_list]
        return original(tensor, scatter_list, *args, **kwargs)

    return scatter


def _uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather tensors whose first dimensions differ.

    Gloo refuses them. Megatron's dispatcher needs them where experts are split (``moe/token_dispatcher.py``,
    ``dispatch_postprocess``): each rank has as many tokens as were routed to it.
    """

    @functools.wraps(original)
    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths = [part.shape[0] for part in tensor_list if part.ndim]
        if len(set(lengths)) <= 1:
            return original(tensor_list, tensor, *args, **kwargs)
        longest = torch.empty(max(lengths), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        padded = [torch.empty_like(longest) for _ in tensor_list]
        longest[: tensor.shape[0]] = tensor
        work = original(padded, longest, *args, **kwargs)
        if work is not None:
            work.wait()
        for part, whole in zip(tensor_list, padded, strict=True):
            part.copy_(whole[: part.shape[0]])
        return work

    return all_gather
