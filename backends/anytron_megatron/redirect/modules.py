"""Keep the attributes of parameters when a module moves to a device for which torch makes new parameters.

``Module.to`` changes the memory of a parameter in place where torch can do so. For devices that a package adds to torch
(PrivateUse1), it makes a new ``Parameter``, without the attributes, hooks and sharing of the old one. Megatron marks
parameters with attributes (``sequence_parallel``, ``tensor_model_parallel``, ``allreduce``, ``shared``) and sums their
gradients accordingly.

Sharing is kept among the modules that one call moves. A parameter that two modules share loses its tie if each is moved
by a call of its own. A parameter of a subclass of ``Parameter`` becomes a plain one.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module, Parameter

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def substitutions() -> Iterator[Substitution]:
    """Replace ``torch.nn.Module._apply``, with which a module moves and changes its dtype."""
    yield Substitution(torch.nn.Module, "_apply", _keeping_marks(torch.nn.Module._apply))


class _Moving(threading.local):
    """The call of ``_apply`` that a thread is in.

    Attributes:
        depth: Number of nested calls.
        renewed: Old and new parameters of the outermost call, by the old parameter's id.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.renewed: dict[int, tuple[Parameter, Parameter]] = {}


def _keeping_marks(original: Callable[..., Module]) -> Callable[..., Module]:
    moving = _Moving()

    @functools.wraps(original)
    def apply(self: Module, *args: Any, **kwargs: Any) -> Module:
        before = dict(self._parameters)
        moving.depth += 1
        try:
            result = original(self, *args, **kwargs)
            for name, old in before.items():
                new = self._parameters[name]
                if old is None or new is None or new is old:
                    continue
                if id(old) in moving.renewed:  # another module has the same parameter
                    self._parameters[name] = moving.renewed[id(old)][1]
                else:
                    moving.renewed[id(old)] = (old, new)
                    _carry_over(old, new)
            return result
        finally:
            moving.depth -= 1
            if not moving.depth:
                moving.renewed.clear()

    return apply


def _carry_over(old: Parameter, new: Parameter) -> None:
    """Give the new parameter the attributes and the hooks of the old one."""
    new.__dict__.update(vars(old))
    for name in HOOKS:
        if (hooks := getattr(old, name)) is not None:
            setattr(new, name, hooks)
