"""What ``preprocess_sequences`` makes of a micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.sequences.layout import IGNORED_LABEL
from anytron_conformance.micro_batches import micro_batch, planned_layout, scenes
from anytron_conformance.rules import Broken, rule

if TYPE_CHECKING:
    from anytron_conformance.micro_batches import Scene
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject


@rule(
    "inputs-keep-tokens",
    "sequences",
    "preprocess_sequences moves, drops and rolls nothing: real tokens keep their ids, labels and positions.",
    cases=[scene.case for scene in scenes(parallel=((1, 1), (2, 1), (1, 2)))],
)
def inputs_keep_tokens(subject: Subject, case: Case) -> None:
    """A micro-batch goes through the hook on each context-parallel rank, and all ranks' tokens are put together again.

    Every token must be there once, with its own position, and labelled with the one that follows it in its sequence.
    What the hook was given must not be changed in place: engines use it for other things.
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
                raise Broken("preprocess_sequences changed the ids that it was given in place.")
            if not torch.equal(before[real], after[real]):
                raise Broken(
                    f"{name} of real tokens are others.", f"{after[real].tolist()}, were {before[real].tolist()}"
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
            "A token is not where it belongs.",
            f"token {first - 100} has (position, label) {seen.get(first)}, expected {expected[first]}",
        )
