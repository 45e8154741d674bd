"""Rules about layout constraints, changes of micro-batches, and the conversion of outputs to flat values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from anytron.device.platform import Feature, LayoutRequest, layout_constraints_of
from anytron.kernels.oracles.attention import reference_attention
from anytron.sequences.layout import IGNORED_LABEL, ContextShard
from anytron_conformance.compare import assert_close
from anytron_conformance.micro_batches import Scene, micro_batch, planned_layout, scenes
from anytron_conformance.ranks import Member, on_ranks
from anytron_conformance.rules import Broken, Case, rule
from anytron_conformance.sequences.masks import HEADS, SCALE, attention_of, operands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.sequences.layout import SequenceLayout
    from anytron_conformance.subject import Subject


@rule(
    "constraints-are-fixed",
    "sequences",
    "layout_constraints returns the same constraints at each call, and layouts can be planned with them.",
    cases=[scene.case for scene in scenes(parallel=((1, 1), (2, 1), (1, 2), (2, 2)))],
)
def constraints_are_fixed(subject: Subject, case: Case) -> None:
    """``layout_constraints`` is called twice. Each rank calls it: ranks with different layouts would hang."""
    scene: Scene = case.values
    request = LayoutRequest(scene.format, scene.traits, scene.sizes)
    first, second = (layout_constraints_of(subject.platform, request) for _ in range(2))
    layout = planned_layout(subject, scene)
    if first != second:
        raise Broken("layout_constraints gives other constraints at the second call.", f"{first}, then {second}")
    if int((layout.padded_lengths % first.align).sum()):
        raise Broken("A padded length is not a multiple of align.", f"{layout.padded_lengths.tolist()}, {first}")


def _tight(subject: Subject) -> Iterator[Case]:
    """Lengths whose padded lengths are odd multiples of the claimed alignment, and of no larger alignment."""
    for place, sequence_format in enumerate(("thd", "bshd")):
        base = Scene(sequence_format, (1,))  # type: ignore[arg-type]
        align = layout_constraints_of(subject.platform, LayoutRequest(base.format, base.traits, base.sizes)).align
        for lengths in ((1,), (align,), (3 * align,), (align, 3 * align, 1), (2 * align + 1, align, 5 * align)):
            case = Scene(base.format, lengths).case
            yield Case(f"{case.name}, align {align}", case.values, 2 * case.size + place, case.needs)


@rule(
    "alignment-suffices",
    "sequences",
    "The attention kernel gives right results for sequences that are padded only as layout_constraints requires.",
    cases=_tight,
)
def alignment_suffices(subject: Subject, case: Case) -> None:
    """Padded lengths are odd multiples of the claimed alignment; values and gradients are compared with float64.

    If a kernel needs multiples of 16 but the platform declares 8, only every second length works.
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


@rule(
    "inputs-keep-tokens",
    "sequences",
    "preprocess_sequences moves, drops and rolls nothing: real tokens keep their ids, labels and positions.",
    cases=[scene.case for scene in scenes(parallel=((1, 1), (2, 1), (1, 2)))],
)
def inputs_keep_tokens(subject: Subject, case: Case) -> None:
    """``preprocess_sequences`` gets a micro-batch on each context-parallel rank; the tokens of all ranks are combined.

    Every token must occur once, with its own position, and with the next token of its sequence as label.
    The hook must not change its argument in place, because engines use it elsewhere.
    """
    scene: Scene = case.values
    seen: dict[int, tuple[int, int]] = {}
    for rank in range(scene.context):
        kept = planned_layout(subject, scene)  # made again: nothing of the other can have changed it
        batch = micro_batch(subject, scene, rank=rank)
        for name in ("input_ids", "labels", "position_ids"):
            before, after = getattr(batch.given, name), getattr(batch.inputs, name)
            real = batch.layout.valid
            if name == "input_ids" and not torch.equal(before, batch.layout.pack(batch.tokens)):
                raise Broken("preprocess_sequences changed the input_ids of its argument in place.")
            if not torch.equal(before[real], after[real]):
                raise Broken(
                    f"preprocess_sequences changed the {name} of real tokens.",
                    f"{after[real].tolist()}, were {before[real].tolist()}",
                )
        if not torch.equal(kept.cu_seqlens.cpu(), batch.layout.cu_seqlens.cpu()):
            raise Broken("preprocess_sequences changed the layout in place.")
        rows = zip(
            batch.inputs.input_ids[real].tolist(),
            batch.inputs.position_ids[real].tolist(),
            batch.inputs.labels[real].tolist(),
            strict=True,
        )
        seen |= {token: (position, label) for token, position, label in rows}
    expected, token = {}, int(batch.tokens[0])
    for length in scene.lengths:
        for position in range(length):
            following = token + 1 if position + 1 < length else IGNORED_LABEL
            expected[token] = (position, following)
            token += 1
    if seen != expected:
        first = min(one for one in expected if seen.get(one) != expected[one])
        raise Broken(
            "A token is in the wrong place.",
            f"token {first - 100} has (position, label) {seen.get(first)}, expected {expected[first]}",
        )


SHAPES: tuple[tuple[int, ...], ...] = ((), (3,))
"""Dimensions of an output after its rows and columns: log-probs have none, hidden states have one."""


@rule(
    "outputs-come-back",
    "sequences",
    "postprocess_output gives the values of real tokens, in the order of the input, with their gradients.",
    cases=[scene.case for scene in scenes(parallel=((1, 1), (2, 1)))],
)
def outputs_come_back(subject: Subject, case: Case) -> None:
    """Values that differ for every token, with NaN in padding, are converted back and multiplied with weights.

    The gradient of a real slot is its token's weight, that of padding 0. With a hook that detaches its result, nothing
    is trained; with one that drops or reorders tokens, each token gets the advantage of another.
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
    """Each of two ranks holds its part of each sequence, and must get back the values of all tokens."""
    on_ranks(subject, 2, compare_shard, case.values)


def compare_shard(member: Member, scene: Scene) -> None:
    """Compare the values that this rank gets back with the values of all tokens."""
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
        raise Broken(
            "The values have a different dtype or shape.",
            f"{found.dtype} {tuple(found.shape)}, not {tuple(flat.shape)}",
        )
    if not torch.equal(found, flat):
        wrong = int((found != flat).reshape(total, -1).any(-1).nonzero()[0])
        raise Broken(
            "A token has the value of another token.", f"token {wrong} has {found[wrong]}, its own is {flat[wrong]}"
        )
    if not found.requires_grad:
        raise Broken("No gradient flows back: the result is detached from the model's output.")
    weights = flat.flip(0) + 1
    (gradient,) = torch.autograd.grad((found * weights).sum(), output, allow_unused=True)
    if gradient is None or not torch.equal(gradient, layout.pack(weights)):
        raise Broken("The gradients are wrong.", f"{None if gradient is None else gradient.flatten()[:8].tolist()}")
