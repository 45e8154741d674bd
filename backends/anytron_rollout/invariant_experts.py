"""Experts of a Hugging Face model, computed in the order of Megatron's operations, so that bits can be equal.

Transformers multiplies an expert's result by its weight, Megatron what enters the expert's last layer; and they
normalise a token's weights in another order. In exact arithmetic both are the same.

Legend: N tokens of H features, E experts, K of them for a token, I features within an expert.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from anytron.base.errors import EngineError
from anytron.kernels.contract import KernelName, KernelSpec
from anytron.kernels.invariant import OneFormula, sigmoid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.kernels.contract import KernelSource

    Router = Callable[[nn.Module, Tensor, Tensor | None], tuple[Tensor, Tensor]]

ACTIVATIONS = (nn.SiLU, SiLUActivation)
"""Modules that compute SiLU."""


def rebind_experts(model: Any, kernels: KernelSource, device_type: str) -> None:
    """Let the routers and the experts of a model compute with company-invariant kernels.

    Args:
        model: A ``transformers.PreTrainedModel``. Nothing happens if it has no experts.
        kernels: Source of company-invariant kernels.
        device_type: ``torch.device`` type of the model.

    Raises:
        EngineError: The model has experts of another form than those of :data:`ROUTERS`.
    """
    blocks = [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
    if not blocks:
        return
    kind = model.config.get_text_config().model_type
    linear = kernels.fused_kernel(KernelName.LINEAR, KernelSpec(device_type, torch.float32))
    for block in blocks:
        experts, gate = block.experts, getattr(block, "gate", None)
        if kind not in ROUTERS or gate is None or not isinstance(experts.act_fn, ACTIVATIONS):
            raise _unknown(kind, type(block).__name__)
        spec = KernelSpec(device_type, experts.gate_up_proj.dtype)
        multiply, swiglu = (kernels.fused_kernel(name, spec) for name in (KernelName.GROUPED_MM, KernelName.SWIGLU))
        vars(experts)["forward"] = partial(_compute, multiply, swiglu, experts)
        vars(gate)["forward"] = partial(_route, linear, ROUTERS[kind], gate)
        if hasattr(block, "shared_expert_gate"):
            vars(block)["forward"] = partial(_by_one_formula, type(block).forward, block)


def by_softmax(gate: Any, logits: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weigh the chosen experts by their probabilities, of which the sum is 1 if the router normalises them."""
    if gate.norm_topk_prob:
        scores, chosen = torch.topk(logits, gate.top_k, dim=1)
        return torch.softmax(scores, dim=-1), chosen
    weights, chosen = torch.topk(torch.softmax(logits, dim=-1), gate.top_k, dim=1)
    return weights, chosen


def by_sigmoid(gate: Any, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose by sigmoid plus bias, within the best groups if there are several; weigh by the sigmoid."""
    scores = sigmoid(logits)
    biased = scores + (gate.e_score_correction_bias if bias is None else bias)
    chosen = torch.topk(_in_best_groups(gate, biased), gate.top_k, dim=1)[1]
    weights = scores.gather(1, chosen)
    if getattr(gate, "norm_topk_prob", True):
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    factor = getattr(gate, "router_scaling_factor", getattr(gate, "routed_scaling_factor", None))
    return weights if factor is None else weights * factor, chosen


ROUTERS: Mapping[str, Router] = {
    "deepseek_v3": by_sigmoid,
    "dots1": by_sigmoid,
    "glm4_moe": by_sigmoid,
    "glm4_moe_lite": by_sigmoid,
    "hy_v3": by_sigmoid,
    "minimax_m2": by_sigmoid,
    "olmoe": by_softmax,
    "qwen2_moe": by_softmax,
    "qwen3_moe": by_softmax,
}
"""The function that routes, by ``model_type``. It gets the router, logits float32 ``[N, E]``, and the bias ``[E]`` with
which the router was called or None; it returns weights float32 ``[N, K]`` and experts int64 ``[N, K]``."""


def _route(
    linear: Callable[..., Tensor], router: Router, gate: Any, hidden: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As a router of transformers: return logits ``[N, E]``, weights and chosen experts ``[N, K]``."""
    logits = linear(hidden.reshape(-1, gate.weight.shape[1]).float(), gate.weight.float(), None)
    return logits, *router(gate, logits, bias)


def _compute(
    multiply: Callable[..., Tensor],
    swiglu: Callable[[Tensor], Tensor],
    experts: Any,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """As experts of transformers: compute ``x`` ``[N, H]`` with chosen experts and their float32 weights ``[N, K]``.

    Returns:
        ``[N, H]`` in the type of ``x``.
    """
    order = chosen.flatten().argsort(stable=True)
    rows = order // chosen.shape[1]
    splits = torch.bincount(chosen.flatten(), minlength=experts.num_experts).tolist()
    inner = swiglu(multiply(x[rows], experts.gate_up_proj.unbind(), splits))
    weighted = (inner * weights.flatten()[order, None]).to(x.dtype)
    return torch.zeros_like(x).index_add_(0, rows, multiply(weighted, experts.down_proj.unbind(), splits))


def _by_one_formula(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with OneFormula():
        return forward(block, *args, **kwargs)


def _in_best_groups(gate: Any, scores: Tensor) -> Tensor:
    """Set scores ``[N, E]`` to -inf outside a token's best groups, which are those with the largest two scores."""
    groups = getattr(gate, "num_group", None) or 1
    if groups == 1:
        return scores
    parts = scores.view(scores.shape[0], groups, -1)
    best = parts.topk(2, dim=-1)[0].sum(-1).topk(gate.topk_group, dim=-1)[1]
    kept = torch.zeros(parts.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, value=True)
    return parts.masked_fill(~kept[..., None], -torch.inf).view_as(scores)


def _unknown(kind: str, block: str) -> EngineError:
    return EngineError(
        "The rollout engine cannot compute this model's experts in Megatron's order.",
        where=f"engine.on_policy=bitwise, {block} of a {kind}",
        why=f"it knows gated experts with SiLU of {', '.join(ROUTERS)}",
        fix="set rollout.engine=megatron, or engine.on_policy=close",
    )
