"""Compute log-probs and entropies with the platform's kernel, and compare with their definition in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.kernels.contract import LogProbSpec
from anytron.kernels.oracles.formulas import reference_log_probs

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.proof.doctor.bench import Bench

TOKENS, HIDDEN, VOCABULARY, FILLED_UP = 37, 64, 1500, 1536
"""The last rows of the output layer are no tokens."""
TEMPERATURE = 0.7
IGNORED_EVERY = 5
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Of values and gradients, as a part of the largest one."""


def probe_log_probs(bench: Bench) -> dict[str, Any]:
    """Compute on the device; the answer is as that of :func:`anytron.proof.doctor.attention.probe_attention`."""
    device, hooks = bench.runtime.current_device(), bench.session.hooks
    # More than one tile: 16 tokens' logits at a time, or 1024 entries of each.
    kernel = hooks.log_prob_kernel(LogProbSpec(VOCABULARY, 1, 16, bench.runtime.device_type, bench.dtype))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(bench.dtype)
    weight = (torch.randn(FILLED_UP, HIDDEN, generator=generator) * 0.3).to(bench.dtype)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::IGNORED_EVERY] = -100
    exact = [operand.double().requires_grad_() for operand in (hidden, weight)]
    wanted = reference_log_probs(exact[0], exact[1], labels, entries=VOCABULARY, temperature=TEMPERATURE)
    leaves = [operand.to(device).requires_grad_() for operand in (hidden, weight)]
    found = kernel(leaves[0], leaves[1], labels.to(device), TEMPERATURE, None)
    difference = _difference([*wanted, *_gradients(wanted, exact)], [*found, *_gradients(found, leaves)])
    bench.runtime.synchronize()
    return {
        "difference": difference,
        "tolerance": TOLERANCE.get(bench.dtype, 0.05),
        "wrong": 0,
        "detail": f"{TOKENS} tokens, vocabulary of {VOCABULARY}, temperature {TEMPERATURE}, {bench.dtype}",
        "supplier": hooks.suppliers()["log_prob_kernel"],
        "mask_from": "",
    }


def _gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor | None]:
    """Gradients of something that weighs tokens differently, and both outputs."""
    log_probs, entropy = outputs
    if not log_probs.requires_grad or not entropy.requires_grad:
        return [None] * len(leaves)
    weights = torch.linspace(0.5, 1.5, len(log_probs), dtype=log_probs.dtype, device=log_probs.device)
    return list(torch.autograd.grad((weights * (log_probs + 0.3 * entropy)).sum(), leaves, allow_unused=True))


def _difference(wanted: list[Any], found: list[Any]) -> float:
    largest = 0.0
    for want, value in zip(wanted, found, strict=True):
        if value is None or not bool(value.isfinite().all()):
            return float("inf")
        gap = (value.detach().cpu().double() - want.detach()).abs().max() / want.detach().abs().max()
        largest = max(largest, float(gap))
    return largest
