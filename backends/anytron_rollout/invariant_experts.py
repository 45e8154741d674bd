"""Experts of a Hugging Face model, computed in the order of Megatron's operations, so that bits can be equal.

Transformers multiplies an expert's result by its weight, Megatron what enters the expert's last layer; and they
normalise a token's weights in another order. In exact arithmetic both are the same.

Legend: N tokens of H features, E experts, K of them for a token, I features within an expert.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.kernels.contract import KernelName, KernelSpec
from anytron.kernels.invariant import OneFormula, sigmoid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from anytron.kernels.contract import KernelSource

    Router = Callable[[nn.Module, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def rebind_experts(model: Any, kernels: KernelSource, device_type: str) -> None:
    """Let the routers and the experts of a model compute with company-invariant kernels.

    Args:
        model: A ``transformers.PreTrainedModel``. Nothing happens if it has no experts.
        kernels: Source of company-invariant kernels.
        device_type: ``torch.device`` type of the model.
    """
    for block in model.modules():
        experts, gate = getattr(block, "experts", None), getattr(block, "gate", None)
        if experts is None or gate is None:
            continue
        dtype = experts.gate_up_proj.dtype
        multiply, gate_up = (
            kernels.fused_kernel(name, KernelSpec(device_type, dtype))
            for name in (KernelName.GROUPED_MM, KernelName.SWIGLU)
        )
        vars(experts)["forward"] = partial(_compute, multiply, gate_up, experts)
        if hasattr(block, "shared_expert_gate"):
            vars(block)["forward"] = partial(_by_one_formula, type(block).forward, block)
        linear = kernels.fused_kernel(KernelName.LINEAR, KernelSpec(device_type, torch.float32))
        vars(gate)["forward"] = partial(_route, linear, ROUTERS[model.config.get_text_config().model_type], gate)


def by_softmax(gate: Any, logits: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights are probabilities among the chosen experts or, unless they are normalised, among all."""
    if gate.norm_topk_prob:
        scores, chosen = torch.topk(logits, gate.top_k, dim=1)
        return torch.softmax(scores, dim=-1), chosen
    weights, chosen = torch.topk(torch.softmax(logits, dim=-1), gate.top_k, dim=1)
    return weights, chosen


def by_sigmoid(gate: Any, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sigmoids are the weights; with a bias they decide who is chosen, within the best groups if there are several."""
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
"""How each ``model_type`` chooses: from a router, logits float32 ``[N, E]`` and a bias ``[E]`` that the router is
called with or None, to weights float32 and experts ``[N, K]``."""


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
    """As experts of transformers: ``x`` ``[N, H]``, chosen experts and their float32 weights ``[N, K]``."""
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
    groups = getattr(gate, "num_group", None) or 1
    if groups == 1:
        return scores
    parts = scores.view(scores.shape[0], groups, -1)
    best = parts.topk(2, dim=-1)[0].sum(-1).topk(gate.topk_group, dim=-1)[1]
    kept = torch.zeros(parts.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, value=True)
    return parts.masked_fill(~kept[..., None], -torch.inf).view_as(scores)
