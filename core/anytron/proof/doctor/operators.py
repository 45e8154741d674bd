"""The probe of the topic ``operators``: which operators of a training step the device computes itself.

An operator without a kernel of the device goes to the device's fallback, if it has one. That is usually the host: the
operands are copied there and the result back, without a warning. The dispatcher knows which operators have a kernel.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron.proof.doctor.probes import Bench

COMPOSED = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
"""Dispatch keys of operators that torch composes of others, on every device."""
STRUCTURED = "CompositeExplicitAutogradNonFunctional"
"""Dispatch key of operators that allocate their result and call an overload that writes into it."""
ENTRIES, WIDTH, HEADS, TOKENS = 16, 64, 4, 8


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def operators(bench: Bench) -> dict[str, Any]:
    """Count the operator calls of a small training step, and those for which the device has no kernel.

    Returns:
        ``calls`` (number of calls), ``host`` (number of calls of each operator without a kernel for the device) and
        ``named`` (their share and the operators, in words).
    """
    key = torch._C._dispatch_key_for_device(bench.runtime.current_device().type)
    counted = _Count()
    step = _training_step(bench.runtime.current_device(), bench.dtype)
    with counted:
        step()
    bench.runtime.synchronize()
    host = {name: calls for name, calls in counted.calls.items() if not _has_kernel(name, key)}
    calls = sum(counted.calls.values())
    each = ", ".join(f"{name.removeprefix('aten::')} ({times})" for name, times in sorted(host.items()))
    return {"calls": calls, "host": host, "named": f"{sum(host.values())} of the {calls} operator calls: {each}"}


class _Layer(torch.nn.Module):
    """A causal transformer layer in plain torch, operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(ENTRIES, WIDTH)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, S, ENTRIES]`` for tokens ``[B, S]``."""
        hidden = self.embedding(tokens)
        split = self.qkv(self.norms[0](hidden)).view(*tokens.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        hidden_keys = torch.ones(TOKENS, TOKENS, device=tokens.device, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1) @ value
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.down(functional.silu(self.up(self.norms[1](hidden))))
        logits: Tensor = hidden @ self.embedding.weight.T
        return logits


def _training_step(device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Make a small model on the device, and return the function that takes one step with it."""
    layer = _Layer().to(device, dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    tokens = (torch.arange(2 * TOKENS) % ENTRIES).view(2, TOKENS).to(device)

    def step() -> None:
        loss = functional.cross_entropy(layer(tokens).float().view(-1, ENTRIES), tokens.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, foreach=False)
        optimizer.step()

    return step


def _has_kernel(name: str, key: str) -> bool:
    """Whether the device has a kernel for an operator, or torch composes the operator of others.

    Args:
        name: Name with namespace and overload, ``aten::add.Tensor``.
        key: Dispatch key of the device.
    """
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(registered(name, one) for one in (key, *COMPOSED)):
        return True
    if not registered(name, STRUCTURED):
        return False
    writing = _out_overload(name)
    return writing is not None and any(registered(writing, one) for one in (key, *COMPOSED))


def _out_overload(name: str) -> str | None:
    """Find the overload that a structured operator calls: the same arguments, and tensors that receive the results."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(torch.ops.aten, base.removesuffix("_"), None)
    called = getattr(getattr(torch.ops.aten, base), overload or "default")
    arguments = [(one.name, str(one.type)) for one in called._schema.arguments]
    for candidate in [] if operator is None else [getattr(operator, one) for one in operator.overloads()]:
        given = candidate._schema.arguments
        others = [(one.name, str(one.type)) for one in given if not one.is_out]
        if len(others) < len(given) and others == arguments:
            found: str = candidate.name()
            return found
    return None
