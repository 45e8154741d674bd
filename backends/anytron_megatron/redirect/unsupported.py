"""CUDA features without a counterpart: making one is an error that says so, asking about it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.errors import EngineError
from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Iterator

# Name in torch.cuda, and the Megatron option that leads to it.
UNSUPPORTED = {
    "CUDAGraph": "leave enable_cuda_graph / cuda_graph_impl off",
    "graph": "leave enable_cuda_graph / cuda_graph_impl off",
    "MemPool": "leave nccl_ub and unified memory off",
    "ExternalStream": "leave high-priority and SHARP communicator streams off",
}


def substitutions() -> Iterator[Substitution]:
    """Classes that others may annotate with and test against, but not make."""
    for name, fix in UNSUPPORTED.items():
        yield Substitution(torch.cuda, name, _refusing_class(name, fix))


def _refusing_class(name: str, fix: str) -> type:
    def __init__(*_: Any, **__: Any) -> None:  # noqa: N807 - becomes a constructor
        raise EngineError(
            f"torch.cuda.{name} has no counterpart on this platform",
            where="engine code that was redirected from torch.cuda",
            why="it exists on CUDA devices only",
            fix=fix,
        )

    return type(name, (), {"__init__": __init__, "__module__": "torch.cuda"})
