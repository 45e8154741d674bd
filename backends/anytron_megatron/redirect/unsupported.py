"""Refuse CUDA features without a counterpart: to make one is an error, to ask about it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError
from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Iterator

# Names in torch.cuda, and the Megatron options that use them.
UNSUPPORTED = {
    "CUDAGraph": "leave enable_cuda_graph / cuda_graph_impl off",
    "graph": "leave enable_cuda_graph / cuda_graph_impl off",
    "MemPool": "leave nccl_ub and unified memory off",
    "ExternalStream": "leave high-priority and SHARP communicator streams off",
}


def substitutions() -> Iterator[Substitution]:
    """Replace classes by ones that can be named in annotations and ``isinstance``, but not instantiated."""
    for name, fix in UNSUPPORTED.items():
        yield Substitution(torch.cuda, name, _refusing_class(name, fix))


def _refusing_class(name: str, fix: str) -> type:
    def __init__(*_: Any, **__: Any) -> None:  # noqa: N807 - becomes a constructor
        raise EngineError(
            f"torch.cuda.{name} has no counterpart on this platform.",
            where="engine code that was redirected from torch.cuda",
            why="it exists on CUDA devices only",
            fix=fix,
        )

    return type(name, (), {"__init__": __init__, "__module__": "torch.cuda"})
