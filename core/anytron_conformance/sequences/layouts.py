"""What the platform asks of layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.device.platform import LayoutRequest, layout_constraints_of
from anytron.kernels.oracles.attention import reference_attention
from anytron_conformance.compare import assert_close
from anytron_conformance.micro_batches import Scene, micro_batch, planned_layout, scenes
from anytron_conformance.rules import Broken, Case, rule
from anytron_conformance.sequences.attention import HEADS, SCALE, attention_of, operands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron_conformance.subject import Subject


@rule(
    "constraints-are-fixed",
    "sequences",
    "layout_constraints answers the same each time, and what it answers can be planned.",
    cases=[scene.case for scene in scenes(parallel=((1, 1), (2, 1), (1, 2), (2, 2)))],
)
def constraints_are_fixed(subject: Subject, case: Case) -> None:
    """Each rank asks by itself, at engine build: answers that differ give ranks that wait for each other."""
    scene: Scene = case.values
    request = LayoutRequest(scene.format, scene.traits, scene.sizes)
    first, second = (layout_constraints_of(subject.platform, request) for _ in range(2))
    layout = planned_layout(subject, scene)
    if first != second:
        raise Broken("The constraints are others when they are asked for again.", f"{first}, then {second}")
    if int((layout.padded_lengths % first.align).sum()):
        raise Broken("A padded length is no multiple of align.", f"{layout.padded_lengths.tolist()}, {first}")


def _tight(subject: Subject) -> Iterator[Case]:
    """Lengths that end up at odd multiples of the claimed alignment, so that they are multiples of nothing more."""
    for place, sequence_format in enumerate(("thd", "bshd")):
        base = Scene(sequence_format, (1,))  # type: ignore[arg-type]
        align = layout_constraints_of(subject.platform, LayoutRequest(base.format, base.traits, base.sizes)).align
        for lengths in ((1,), (align,), (3 * align,), (align, 3 * align, 1), (2 * align + 1, align, 5 * align)):
            case = Scene(base.format, lengths).case
            yield Case(f"{case.name}, align {align}", case.values, 2 * case.size + place, case.needs)


@rule(
    "alignment-suffices",
    "sequences",
    "The attention kernel computes right on sequences that are padded as layout_constraints asks, and no further.",
    cases=_tight,
)
def alignment_suffices(subject: Subject, case: Case) -> None:
    """Padded lengths are odd multiples of the claimed alignment; values and gradients are compared with float64.

    A kernel that needs multiples of 16 and a platform that declares 8 agree on every second length only.
    """
    scene: Scene = case.values
    batch = micro_batch(subject, scene)
    attend = attention_of(subject, batch, scene.traits)
    flat = operands(scene.total)
    exact = [operand.double().requires_grad_() for operand in flat]
    expected = reference_attention(*exact, lengths=scene.lengths, scale=SCALE)
    leaves = [operand.to(subject.device).requires_grad_() for operand in flat]
    try:
        output = attend(*(batch.layout.pack(leaf) for leaf in leaves))
    except Exception as error:
        padded = batch.layout.padded_lengths.tolist()
        raise Broken(
            "The attention kernel refuses a layout that the platform allows.", f"padded {padded}: {error}"
        ) from error
    found = batch.layout.unpack(output)
    weights = torch.linspace(-1, 1, found.numel()).view(scene.total, *HEADS[:1], -1)
    assert_close(found, expected, "The output of attention", dtype=torch.float32, factor=10)
    if not found.requires_grad:
        raise Broken("The output of attention has no gradient.")
    gradients = torch.autograd.grad((found * weights.to(found)).sum(), leaves, allow_unused=True)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for name, gradient, want in zip(("queries", "keys", "values"), gradients, wanted, strict=True):
        assert_close(gradient, want, f"The gradient of the {name}", dtype=torch.float32, factor=10)
