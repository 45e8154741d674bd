"""The way back: ``postprocess_output``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from anytron.device.platform import Feature
from anytron.sequences.layout import ContextShard
from anytron_conformance.micro_batches import Scene, planned_layout, scenes
from anytron_conformance.ranks import Member, on_ranks
from anytron_conformance.rules import Broken, rule

if TYPE_CHECKING:
    from anytron.sequences.layout import SequenceLayout
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject

SHAPES: tuple[tuple[int, ...], ...] = ((), (3,))
"""What comes after rows and columns: log-probs have nothing, hidden states one dimension."""


@rule(
    "outputs-come-back",
    "sequences",
    "postprocess_output gives the values of real tokens, in the order of the input, with their gradients.",
    cases=[scene.case for scene in scenes(parallel=((1, 1), (2, 1)))],
)
def outputs_come_back(subject: Subject, case: Case) -> None:
    """Values that tell every token apart, NaN in padding, are brought back and weighted with different weights.

    The gradient of a real slot is its token's weight, that of padding 0. A hook that detaches its answer trains
    nothing; one that drops or reorders tokens gives each the advantage of another.
    """
    layout = planned_layout(subject, case.values).to(subject.device)
    for shape in SHAPES:
        _compare(subject, layout, shape)


@rule(
    "context-parallel-outputs",
    "sequences",
    "With context parallelism postprocess_output gathers the values of all ranks, and gradients reach their own rank.",
    cases=[scene.case for scene in scenes(parallel=((1, 2),))],
    needs=[Feature.CONTEXT_PARALLEL],
    limit_s=360.0,
)
def context_parallel_outputs(subject: Subject, case: Case) -> None:
    """Two ranks hold their parts of each sequence, and each gets the values of all tokens."""
    on_ranks(subject, 2, compare_shard, case.values)


def compare_shard(member: Member, scene: Scene) -> None:
    """Compare what this rank gets back."""
    shard = ContextShard(member.size, member.rank, distributed.group.WORLD)
    layout = planned_layout(member.subject, scene, shard).to(member.subject.device)
    for shape in SHAPES:
        _compare(member.subject, layout, shape)


def _compare(subject: Subject, layout: SequenceLayout, shape: tuple[int, ...]) -> None:
    total, device = layout.num_tokens, subject.device
    places = torch.arange(1.0, total + 1, device=device).view(-1, *[1] * len(shape))
    flat = places + torch.arange(0.0, max(shape, default=1), device=device).view(shape or ()) / 10
    output = layout.pack(flat, fill=float("nan")).requires_grad_()
    found = subject.hooks.postprocess_output(output, layout)
    if found.dtype != flat.dtype or found.shape != flat.shape:
        raise Broken("The values come back otherwise.", f"{found.dtype} {tuple(found.shape)}, not {tuple(flat.shape)}")
    if not torch.equal(found, flat):
        wrong = int((found != flat).reshape(total, -1).any(-1).nonzero()[0])
        raise Broken(
            "A value comes back for another token.", f"token {wrong} has {found[wrong]}, its own is {flat[wrong]}"
        )
    if not found.requires_grad:
        raise Broken("No gradient flows back: the answer is detached from the model's output.")
    weights = flat.flip(0) + 1
    (gradient,) = torch.autograd.grad((found * weights).sum(), output, allow_unused=True)
    if gradient is None or not torch.equal(gradient, layout.pack(weights)):
        raise Broken("The gradients are wrong.", f"{None if gradient is None else gradient.flatten()[:8].tolist()}")
