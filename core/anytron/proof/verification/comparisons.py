"""Compare logits, values of tokens and norms of gradients of two engines or layouts, each with a tolerance.

Two correct computations add the same products in a different order. The error grows with the size of the numbers, so a
tolerance is a factor times the largest of them (at least 1). The factors are about 100 roundings of float32 (2**-23),
and about 4 of bfloat16 (2**-8) and of float16 (2**-11). Tiny models in float32 stay below 2e-6; a wrong layer (a mask,
a weight, a sum over ranks) is off by 1e-2 of the numbers' size or more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from anytron.base.results import Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.base.results import Status
    from anytron.proof.verification.engines import Observation
    from anytron.sequences.batch import RaggedBatch, TokenOutputs


def measured(check: str, difference: float, tolerance: float, detail: str) -> Result:
    """Make the result of a check that measured a difference: ``failed`` if it is above the tolerance or NaN."""
    status: Status = "passed" if difference <= tolerance else "failed"
    return Result(check, status, detail, difference=difference, tolerance=tolerance)


def joined(results: Sequence[Result]) -> Result:
    """Join the results of the policy and, if there is one, the critic: the worse result, with the details of both."""
    if len(results) == 1:
        return results[0]
    worst = max(results, key=lambda one: (one.status == "failed", used(one.difference, one.tolerance)))
    policy, critic = (one.detail for one in results)
    return replace(worst, detail=f"{policy}; the critic: {critic}")


def used(difference: float | None, tolerance: float | None) -> float:
    """Return a difference as a fraction of its tolerance; NaN counts as larger than any number."""
    part = (difference or 0.0) / (tolerance or 1.0)
    return math.inf if math.isnan(part) else part


FACTORS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
"""Factor of the tolerance, by the name of a dtype as in ``model.dtype``."""


def tolerance(dtype: str, values: Tensor) -> float:
    """Return the largest difference allowed between two computations of ``values`` in ``dtype``."""
    scale = float(values.abs().max()) if values.numel() else 1.0
    return FACTORS[dtype] * max(1.0, scale)


def compare_logits(check: str, dtype: str, expected: Tensor, found: Tensor, place: str) -> Result:
    """Compare logits, float32 ``[T, V]``.

    Their log-softmax is compared: logits of a row may differ by a constant, which has no meaning.

    Args:
        check: Name of the check.
        dtype: Name of the element type in which ``found`` was computed.
        expected: Logits of another implementation.
        found: Logits of the engine.
        place: Where ``expected`` was computed, for the result's detail.
    """
    width = min(expected.shape[1], found.shape[1])
    expected, found = expected[:, :width].log_softmax(-1), found[:, :width].log_softmax(-1)
    detail = f"{len(expected)} tokens, {width} logits each, log-probs down to {float(expected.min()):.3g}; {place}"
    return measured(check, largest(found - expected), tolerance(dtype, expected), detail)


def compare_token_outputs(
    check: str,
    dtype: str,
    logits: Tensor,
    sequences: RaggedBatch,
    found: Mapping[float, TokenOutputs],
    *,
    entropies: bool = True,
) -> Result:
    """Compare log-probs and entropies with those computed from logits of another engine.

    As in :func:`compare_logits`, the tolerance follows from the largest absolute log-prob of any token of the
    vocabulary: the rounding errors of all logits of a row go into each value.

    Args:
        check: Name of the check.
        dtype: Element type that the engine computes in.
        logits: float32 ``[T, V]``; row t predicts the token after token t.
        sequences: The sequences to which the logits belong, T tokens in all.
        found: Results of the engine, by temperature, for these sequences and possibly more after them.
        entropies: Whether the engine computed entropies; False = only log-probs are compared.
    """
    places = sequences.response_mask.nonzero()[:, 0]
    rows = logits[places - 1]
    worst, limit, parts = 0.0, FACTORS[dtype], []
    for temperature, outputs in found.items():
        scores = (rows / temperature).log_softmax(-1)
        log_probs = scores.gather(1, sequences.tokens[places][:, None])[:, 0]
        assert outputs.log_probs is not None
        pairs = [(log_probs, outputs.log_probs)]
        if entropies:
            assert outputs.entropy is not None
            pairs.append((-(scores.exp() * scores).sum(-1), outputs.entropy))
        differences, allowed = [], tolerance(dtype, scores)
        for expected, computed in pairs:
            difference = largest(computed[places] - expected)
            differences.append(f"{difference:.2g}")
            if used(difference, allowed) > used(worst, limit):
                worst, limit = difference, allowed
        parts.append(f"at temperature {temperature:g} {' and '.join(differences)}")
    names = "log-probs and entropies" if entropies else "log-probs"
    return measured(check, worst, limit, f"{names} of {len(places)} tokens: {'; '.join(parts)}")


def compare_sampled(check: str, dtype: str, batch: RaggedBatch, log_probs: Tensor, what: str) -> Result:
    """Compare the rollout engine's log-probs of the tokens that it sampled with the training engine's.

    Args:
        check: Name of the check.
        dtype: The run's ``model.dtype``.
        batch: Sampled responses, T tokens, with ``rollout_log_probs``.
        log_probs: The training engine's log-probs, float32 ``[T]``.
        what: What follows the number of tokens in the report.
    """
    assert batch.rollout_log_probs is not None
    drawn = batch.response_mask
    seen = batch.rollout_log_probs[drawn]
    detail = f"{int(drawn.sum())} sampled tokens {what}"
    return measured(check, largest(seen - log_probs[drawn]), tolerance(dtype, seen), detail)


_CHANCE = 1e-6
"""Probability below which equal samples are no coincidence."""


def compare_samples(check: str, batch: RaggedBatch, *, narrowed: bool) -> Result:
    """Look whether the samples of each prompt differ, unless their own log-probs say that they may be equal.

    Args:
        check: Name of the check.
        batch: Sampled responses with ``groups`` and ``rollout_log_probs``; each group has two or more.
        narrowed: Whether top-k or top-p restrict the choice of tokens: log-probs are those before, and say too little.
    """
    assert batch.groups is not None
    assert batch.rollout_log_probs is not None
    lengths = batch.lengths.tolist()
    rows = list(zip(batch.tokens.split(lengths), batch.rollout_log_probs.split(lengths), strict=True))
    chance, different, groups = 0.0, 0, batch.groups.unique().tolist()
    for group in groups:
        (first, log_probs), *others = (row for row, number in zip(rows, batch.groups, strict=True) if number == group)
        different += any(not first.equal(tokens) for tokens, _ in others)
        chance += len(others) * float(log_probs.sum())
    if different:
        return measured(check, 0.0, 0.0, f"the samples of {different} of {len(groups)} prompts differ")
    if narrowed:
        return Result(
            check, "skipped", "all samples of a prompt are equal, which rollout.top_k or rollout.top_p may do"
        )
    detail = f"all samples of each of {len(groups)} prompts are equal, which chance makes with probability"
    if chance > math.log(_CHANCE):
        return Result(check, "skipped", f"{detail} {math.exp(chance):.2g}: too little to tell")
    return measured(check, 1.0, 0.0, f"{detail} {math.exp(chance):.1g}: look at the seeds of requests")


def compare_observations(check: str, dtype: str, own: Observation, found: Observation, what: str) -> Result:
    """Compare the absolute differences of log-probs and values, and the relative differences of gradient norms.

    Args:
        check: Name of the check.
        dtype: Element type that the engines compute in.
        own: Values of the run's own layout; its gradient norms must not be 0.
        found: Values of the other layout.
        what: What is compared, for the result.
    """
    for name, norm in own.grad_norms.items():
        if norm == 0.0:  # of which no comparison would tell: 0 is equal to 0
            return Result(
                check,
                "failed",
                f"the {name} is 0, although every token contributes to the loss: no gradient reaches the weights",
            )
    differences = {
        name: (largest(found.outputs[name] - values), tolerance(dtype, values)) for name, values in own.outputs.items()
    }
    relatives = {name: abs(found.grad_norms[name] - norm) / norm for name, norm in own.grad_norms.items()}
    parts = [f"{name} {difference:.2g}" for name, (difference, _) in differences.items()]
    parts += [f"{name} norm {relative:.2g} relative" for name, relative in relatives.items()]
    detail = f"{what}: {', '.join(parts)}"
    # Gradients add up the differences of the forward passes: we allow ten times their factor.
    if not all(relative <= 10 * FACTORS[dtype] for relative in relatives.values()):
        return Result(check, "failed", f"{detail}; the limit is {10 * FACTORS[dtype]:.2g}")
    return measured(check, *max(differences.values(), key=lambda pair: used(*pair)), detail)


def largest(values: Tensor) -> float:
    """Return the largest absolute value; 0 for an empty tensor."""
    return float(values.abs().max()) if values.numel() else 0.0
