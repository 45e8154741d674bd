"""Settings that make a run smaller: each is tried, and those that help are added up until it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anytron.config.schema import RunConfig
    from anytron.proof.planning.plan import Plan

    Replan = Callable[[Sequence[str]], Plan | None]

WORTH = 0.02
"""Of what a device needs: settings that save less are not named."""
SMALLEST_MICRO_BATCH = 1024
"""Tokens, below which a smaller micro-batch is not proposed: it must hold the longest sequence."""


@dataclass(frozen=True)
class Remedy:
    """Settings that make the fullest device's share smaller.

    Attributes:
        overrides: As on the command line, ``key=value``.
        needed: Bytes on the fullest device with them.
        fits: Whether every device has room then.
    """

    overrides: tuple[str, ...]
    needed: int
    fits: bool | None


def remedies(run: RunConfig, plan: Plan, replan: Replan) -> tuple[list[Remedy], Remedy | None]:
    """Try each setting alone, and then the best of them together.

    Args:
        run: The configuration.
        plan: Its plan.
        replan: Gives the plan with more overrides; None if the configuration refuses them.

    Returns:
        Those that save something worth it, alone, the most first; and the first ones of :func:`candidates` with which
        the run fits, together, if they do and the device's memory is known.
    """
    helpful = []
    for override in candidates(run):
        tried = replan([override])
        if tried is not None and plan.needed - tried.needed >= WORTH * plan.needed:
            helpful.append(Remedy((override,), tried.needed, tried.fits))
    together = _together(plan, [one.overrides[0] for one in helpful], replan) if plan.fits is False else None
    return sorted(helpful, key=lambda one: one.needed), together


def candidates(run: RunConfig) -> Iterator[str]:
    """Give settings to try, as overrides: first what costs nothing but time, then devices, then other training."""
    engine, rollout, parallel = run.engine, run.rollout, run.parallel
    if rollout.placement == "colocated" and rollout.engine != engine.name and not rollout.sleep:
        yield "rollout.sleep=true"
    if rollout.max_batch_size > 1:
        yield f"rollout.max_batch_size={-(-rollout.max_batch_size // 4)}"
    if not engine.distributed_optimizer:
        yield "engine.distributed_optimizer=true"
    if engine.max_tokens_per_micro_batch // 2 >= SMALLEST_MICRO_BATCH:
        yield f"engine.max_tokens_per_micro_batch={engine.max_tokens_per_micro_batch // 2}"
    if engine.recompute != "full":
        yield "engine.recompute=full"
    parts = ["optimizer", "gradients", *([] if run.teacher is None else ["teacher"])]
    if missing := [name for name in parts if name not in engine.offload]:
        yield f"engine.offload=[{', '.join([*engine.offload, *missing])}]"
    if run.reward_model is not None and not run.reward_model.offload:
        yield "reward_model.offload=true"
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"):
        yield f"parallel.{key}={2 * getattr(parallel, key)}"
    if run.model.lora is None:
        yield "model.lora={rank: 16}"


def _together(plan: Plan, overrides: Sequence[str], replan: Replan) -> Remedy | None:
    """Add one after the other until the run fits, and take back those that were not needed."""
    chosen: list[str] = []
    reached = plan
    for override in overrides:
        tried = replan([*chosen, override])
        if tried is None or tried.needed >= reached.needed:
            continue
        chosen.append(override)
        reached = tried
        if tried.fits:
            break
    else:
        return None
    for override in chosen[:-1]:
        rest = [one for one in chosen if one != override]
        tried = replan(rest)
        if tried is not None and tried.fits:
            chosen, reached = rest, tried
    return Remedy(tuple(chosen), reached.needed, fits=True)
