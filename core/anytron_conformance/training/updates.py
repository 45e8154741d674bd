"""Rules of level ``training`` about updates of recorded trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.device.platform import Feature
from anytron.proof.checks import Inapplicable
from anytron.proof.verification.comparisons import FACTORS, largest, measured, tolerance
from anytron.proof.verification.engines import plan_of
from anytron.proof.verification.gradients import SMALL, compare_gradients, computed_gradients
from anytron.proof.verification.hugging_face import LOSS
from anytron_conformance.rules import Broken, Case, rule
from anytron_conformance.training.recording import (
    ADAM,
    HALF,
    SGD,
    Recording,
    exported,
    follow,
    mini_batches,
    moves,
    record,
    with_micro_batches,
)
from anytron_conformance.training_ranks import START_S, TrainingRanks, hold, said, usual_format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron_conformance.subject import Subject

ADAM_FACTOR = 100.0
"""Factor of the tolerance with Adam, which divides by the size of the gradient and so magnifies rounding."""
ROUNDINGS = 4
"""Units in the last place of a float32 weight that are allowed besides the tolerance: each of three updates rounds the
weight by half a unit, here and on the platform cpu."""
ADAPTERS: dict[str, dict[str, Any]] = {**ADAM, "model": {"lora": {"rank": 4, "dropout": 0.5}}}


class Repetition:
    """The updates that the platform ``cpu`` has recorded for a subject, and the subject's ranks, which repeat them.

    Args:
        subject: The platform under test.
    """

    def __init__(self, subject: Subject) -> None:
        self.output = subject.scratch / "training"
        self.output.mkdir(exist_ok=True)
        self.recording: Recording = record(self.output / "cpu")
        subject.source.open()  # its packages were hidden meanwhile
        self.ranks = TrainingRanks(subject.source, self.output)
        self._format = usual_format(subject)

    @classmethod
    def of(cls, subject: Subject) -> Repetition:
        """Return the repetition of a subject; there is one for each subject."""
        return subject.keep("repetition", lambda: cls(subject))

    def config(self, changes: Mapping[str, dict[str, Any]]) -> RunConfig:
        """Configure the platform's ranks.

        Raises:
            Inapplicable: The plugins refuse the configuration, or the machine has too few devices.
        """
        sections = with_micro_batches(changes)
        sections["engine"].setdefault("sequence_format", self._format)
        return self.ranks.config(self.recording.model, sections)

    def close(self) -> None:
        """End the ranks."""
        self.ranks.close()


def _case(
    size: int, course: str, layout: str, changes: Mapping[str, dict[str, Any]], *needs: Feature, **parallel: int
) -> Case:
    return Case(f"{course}, {layout}", (course, {**changes, "parallel": parallel}), size, needs)


@rule(
    "recorded-updates",
    "training",
    "Updates on recorded trajectories give the same losses, gradient norms and weights as on the platform cpu.",
    cases=(
        _case(0, "SGD", "one rank", SGD),
        _case(1, "Adam", "one rank", ADAM),
        _case(2, "bfloat16", "one rank", HALF, Feature.BFLOAT16),
        _case(3, "SGD", "TP2", SGD, Feature.TENSOR_PARALLEL, tensor_model_parallel_size=2),
        _case(4, "Adam", "DP2", ADAM, data_parallel_size=2),
    ),
    limit_s=START_S,
)
def recorded_updates(subject: Subject, case: Case) -> None:
    """Do three updates on responses that the platform ``cpu`` has sampled.

    The platform ``cpu`` does the same updates on one rank, with the same optimizer and the same initial weights. Losses
    and gradient norms of each update must agree, and so must the change of each weight (in bfloat16, the log-probs
    after all updates). Faults that level ``model`` finds break the rule, and so do faults of the optimizer, of the
    gradients' sum over replicas, and of state that one update passes on to the next.
    """
    name, sections = case.values
    repetition = Repetition.of(subject)
    recording, config = repetition.recording, repetition.config(sections)
    if config.model.dtype != sections.get("model", {}).get("dtype", "float32"):
        raise Inapplicable(f"the platform computes in {config.model.dtype} only")
    trainer = repetition.ranks.build(config)
    with said():
        found = follow(trainer, config, recording.batch, repetition.output)
    expected = recording.courses[name]
    _compare_metrics(found.metrics, expected.metrics, 10 * FACTORS[config.model.dtype], "the platform cpu's")
    if config.model.dtype == "float32":
        limit = 10 * FACTORS["float32"] * (ADAM_FACTOR if name == "Adam" else 1.0)
        _compare_moves(found.moved, expected.moved, limit, found.start, "on the platform cpu")
    else:
        limit = tolerance(config.model.dtype, expected.log_probs)
        result = measured("", largest(found.log_probs - expected.log_probs), limit, "log-probs after three updates")
        hold(result, "After three updates, log-probs differ from the platform cpu's.")


@rule(
    "recomputation",
    "training",
    "Recomputing activations in the backward pass changes no gradient, dropout included.",
    needs=(Feature.RECOMPUTE,),
    limit_s=START_S,
)
def recomputation(subject: Subject, case: Case) -> None:
    """Compute gradients of adapters with dropout, once with ``engine.recompute=full`` and once without.

    A recomputation must draw the same random numbers as the forward pass. A runtime that does not restore the state of
    its generator breaks the rule, and so do scopes that cannot be entered a second time.
    """
    del case
    repetition = Repetition.of(subject)
    found: list[dict[str, Tensor]] = []
    for recompute in ("none", "full"):
        config = repetition.config({**ADAPTERS, "engine": {**ADAPTERS["engine"], "recompute": recompute}})
        trainer = repetition.ranks.build(config)
        with said():
            plan = plan_of(trainer, config)
            mini_batch = next(mini_batches(plan, repetition.recording.batch))
            found.append(computed_gradients(trainer, plan, mini_batch, repetition.output)[0])
    kept, recomputed = found
    result = compare_gradients(
        "", recomputed, kept, dtype=config.model.dtype, skipped={}, what="adapters", whose="those without recomputation"
    )
    hold(result, "Recomputation changes gradients.")


@rule(
    "restored-checkpoint",
    "training",
    "An engine that has loaded a checkpoint continues like the engine that saved it, dropout included.",
    limit_s=START_S,
)
def restored_checkpoint(subject: Subject, case: Case) -> None:
    """Train adapters with dropout: an update, a checkpoint, two more updates; then repeat the two from the checkpoint.

    The final weights must be the same, because a checkpoint holds the states of the optimizer and of all random
    generators. A runtime whose generator state cannot be read or restored breaks the rule, and so do copies to the
    host that are read before they are complete.
    """
    del case
    repetition = Repetition.of(subject)
    config = repetition.config(ADAPTERS)
    checkpoint = repetition.output / "checkpoint"
    checkpoint.mkdir()
    trainer = repetition.ranks.build(config)
    with said():
        plan = plan_of(trainer, config)
        first, *rest = mini_batches(plan, repetition.recording.batch)
        trainer.update(first, plan, LOSS)
        before = exported(trainer, repetition.output)
        trainer.save_checkpoint(str(checkpoint), asynchronous=False)
        trainer.written_files(wait=True)
        metrics = [trainer.update(mini_batch, plan, LOSS) for mini_batch in rest]
        moved = moves(before, exported(trainer, repetition.output))
    trainer = repetition.ranks.build(config)
    with said():
        trainer.load_checkpoint(str(checkpoint))
        loaded = moves(before, exported(trainer, repetition.output))
        changed = [name for name, tensor in loaded.items() if tensor.any()]
        if changed:
            raise Broken(
                "A checkpoint does not restore the weights that were saved.",
                f"{len(changed)} differ, first {changed[0]}",
            )
        metrics_then = [trainer.update(mini_batch, plan, LOSS) for mini_batch in rest]
        moved_then = moves(before, exported(trainer, repetition.output))
    limit = 10 * FACTORS[config.model.dtype]
    _compare_metrics(metrics_then, metrics, limit, "the saving engine's")
    _compare_moves(moved_then, moved, limit * ADAM_FACTOR, before, "in the engine that saved the checkpoint")


def _compare_metrics(
    found: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]], limit: float, whose: str
) -> None:
    """Compare losses and gradient norms of several updates.

    Raises:
        Broken: The metrics differ, or a gradient is 0.
    """
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True), start=1):
        if not got["grad_norm"] > 0.0:
            raise Broken("An update has no gradient.", f"grad_norm of update {number} is {got['grad_norm']}")
        for name in (key for key in wanted if key == "grad_norm" or key.startswith("loss/")):
            difference, allowed = abs(got[name] - wanted[name]), limit * max(abs(wanted[name]), 1.0)
            if not difference <= allowed:
                raise Broken(
                    f"Losses or gradient norms differ from {whose}.",
                    f"{name} of update {number} is {got[name]:.6g}, expected {wanted[name]:.6g} "
                    f"(allowed difference {allowed:.1g})",
                )


def _compare_moves(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float, start: Mapping[str, Tensor], where: str
) -> None:
    """Compare how far weights have moved.

    Args:
        found: Moves of the platform's weights, float32, by name.
        expected: Moves of the reference's weights, float32, by name.
        limit: Largest difference of a weight's entries, as a part of the largest that is expected. The rounding of the
            weights themselves comes on top: it is most of the difference where a weight near 1 moves by 1e-3.
        start: Weights before they moved.
        where: Description of the reference, for the message.

    Raises:
        Broken: A weight has not moved as expected.
    """
    size = max(largest(tensor) for tensor in expected.values())
    off: dict[str, float] = {}
    for name, tensor in expected.items():
        rounding = ROUNDINGS * torch.finfo(torch.float32).eps * largest(start[name])
        difference = max(largest(found[name] - tensor) - rounding, 0.0)
        off[name] = difference / max(largest(tensor), SMALL * size)
    wrong = [name for name, part in off.items() if not part <= limit]
    if wrong:
        worst = max(wrong, key=lambda name: off[name])
        raise Broken(
            f"Updates do not change the weights as {where}.",
            f"{len(wrong)} of {len(off)} weights differ, most {worst}: by {off[worst]:.2g} of its change "
            f"(allowed {limit:.1g})",
        )
