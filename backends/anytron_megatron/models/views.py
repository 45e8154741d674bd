"""Exported weights as views of parameters, instead of the copies that mcore-bridge makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Item = TypeVar("Item")


def without_clones(weights: Iterable[Item]) -> Iterator[Item]:
    """Yield what a generator yields; while it computes, ``Tensor.clone()`` returns the tensor itself.

    mcore-bridge clones each weight that it exports (``mcore_bridge/bridge/gpt_bridge.py``) and never changes one in
    place. The clones would double the time of sending weights to the rollout. The caller's own ``clone()`` copies as
    usual.
    """
    iterator = iter(weights)
    while True:
        with _NoClones():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class _NoClones(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        return args[0] if func is torch.Tensor.clone else func(*args, **(kwargs or {}))
