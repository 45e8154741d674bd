"""Optimizers and the operations over lists of tensors that Megatron's optimizers use."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.kernels.contract import KernelName
from anytron_megatron.portable_te.binding import kernels
from anytron_megatron.portable_te.refusals import refuse_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"]

_CHUNK = 2048 * 32


class _ZeroGrad(torch.optim.Optimizer):
    """``zero_grad`` as in Apex and Transformer Engine: the constructor's ``set_grad_none`` decides.

    Attributes:
        set_grad_none: None or True = ``zero_grad`` frees the gradients, False = it writes zeros.
    """

    set_grad_none: bool | None = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Free the gradients, or fill them with zeros.

        Raises:
            ValueError: ``set_to_none`` contradicts the constructor's ``set_grad_none``, as in Transformer Engine.
        """
        if None not in (set_to_none, self.set_grad_none) and set_to_none != self.set_grad_none:
            raise ValueError(
                f"set_to_none={set_to_none} contradicts set_grad_none={self.set_grad_none} of the constructor: omit one"
            )
        chosen = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=chosen is not False)


class FusedAdam(_ZeroGrad):
    """Adam whose step number is in the parameter group, as in Apex and Transformer Engine.

    Megatron's distributed-optimizer checkpoints rely on that (``distrib_optimizer.py``: with a step
    per parameter, as in ``torch.optim.AdamW``, loading a fully reshardable one fails). Moments are
    float32 under ``exp_avg`` and ``exp_avg_sq``.

    Args:
        bias_correction: Whether to divide the moments by ``1 - beta ** step``.
        adam_w_mode: True = decoupled weight decay; False = L2 regularisation.
        set_grad_none: None or True = ``zero_grad`` frees the gradients, False = it writes zeros.
        unsupported: Transformer Engine's other settings (amsgrad, master weights, FP8 moments, ...).

    Raises:
        EngineError: A setting is not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        set_grad_none: bool | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_settings("FusedAdam", unsupported)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self._adam = kernels().fused(KernelName.ADAM, torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore moments, as copies in float32: torch would give them the parameters' type."""
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(saved, own, strict=True):
            for name, moment in state_dict["state"].get(key, {}).items():
                self.state[param][name] = moment.to(device=param.device, dtype=torch.float32, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **unsupported: Any) -> Any:
        """Update all parameters that have a gradient; return what ``closure`` returns.

        Raises:
            EngineError: A setting is not supported.
        """
        refuse_settings("FusedAdam.step", unsupported)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            # Counted even if this rank holds no part of the group, so that all ranks agree.
            group["step"] = group.get("step", 0) + 1
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    self.state[param]["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
            self._adam(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                step=group["step"],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=self.adam_w_mode,
                bias_correction=group["bias_correction"],
            )
        return loss


class FusedSGD(_ZeroGrad, torch.optim.SGD):
    """``torch.optim.SGD`` with Transformer Engine's arguments; the names in its state are Transformer Engine's too.

    Raises:
        EngineError: A setting is not supported.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
        **unsupported: Any,
    ) -> None:
        # It chooses the number format of the master gradients; there are none without master weights.
        del materialize_master_grads
        refuse_settings("FusedSGD", unsupported)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.set_grad_none = set_grad_none


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
) -> Any:
    """Call ``op`` on lists of tensors."""
    return op(_CHUNK, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the float32 norm of all tensors together, ``[1]``, and with ``per_tensor`` the norm of each, ``[n]``."""
    del chunk_size, noop_flag
    (tensors,) = tensor_lists
    norms = torch.stack(torch._foreach_norm([tensor.float() for tensor in tensors]))
    return norms.norm().reshape(1), norms if per_tensor else None


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float | Tensor
) -> None:
    """Write ``scale`` times the first list into the second, whose element types may differ.

    ``noop_flag`` is ignored: Megatron passes a dummy and checks for infinities elsewhere.
    """
    del chunk_size, noop_flag
    sources, targets = tensor_lists
    if targets is sources:
        torch._foreach_mul_(targets, scale)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, scale))
