"""Let the routers of a mixture of experts of transformers send tokens to experts that somebody else has chosen."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@contextlib.contextmanager
def forced_routing(model: Any, routing: Tensor | None) -> Iterator[None]:
    """Compute with given experts inside; their weights are those that the model's own scores give.

    Args:
        model: A model of transformers.
        routing: ``[T, L, K]`` of one sequence, as in a batch: no engine tells the experts of the last token, which goes
            where the routers send it. None = every token does.

    Raises:
        ValueError: The model has not L routers.
    """
    if routing is None:
        yield
        return
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    if len(routers) != routing.shape[1]:
        raise ValueError(f"the routing is of {routing.shape[1]} layers, and {len(routers)} have a router")
    columns = routing.long().unbind(1)
    hooks = [router.register_forward_hook(partial(_force, own)) for router, own in zip(routers, columns, strict=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _force(
    experts: Tensor, router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace a router's answer: logits ``[T, E]``, weights of the chosen ``[T, K]`` and their numbers ``[T, K]``."""
    del inputs
    logits, _, own = output
    chosen = torch.cat([experts[:-1], own[-1:]])
    # DeepSeek's routers score by sigmoid, and their bias decides the choice only.
    scores = logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1)
    weights = scores.gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen
