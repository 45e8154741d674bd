"""Rules of level ``training`` about whole runs: what ``anytron train`` does, from prompts to checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anytron.device.platform import Feature
from anytron.run.trainer.metrics import AGREEMENT
from anytron_conformance.ranks import require_devices
from anytron_conformance.rules import Broken, Case, rule
from anytron_conformance.training.runs import Run, run
from anytron_conformance.training_ranks import START_S, usual_format

if TYPE_CHECKING:
    from anytron_conformance.subject import Subject

COMPARED = ("reward/", "loss/", "policy/", "rollout/", "grad_norm")
"""Beginnings of the names of metrics that are the same whenever a step is done."""


class Runs:
    """The runs of a subject.

    Args:
        subject: The platform.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._made: dict[str, Run] = {}

    @classmethod
    def of(cls, subject: Subject) -> Runs:
        """Those of a subject."""
        return subject.keep("runs", lambda: cls(subject))

    def make(self, name: str, **changes: object) -> Run:
        """Make a run, or give the one that was made under this name."""
        if name not in self._made:
            changes = {"engine__sequence_format": usual_format(self._subject), **changes}
            self._made[name] = run(self._subject.source, self._subject.scratch / "runs" / name, **changes)
        return self._made[name]

    def close(self) -> None:
        """Nothing is left: the processes of a run end with it."""


@rule(
    "sampled-steps",
    "training",
    "Steps of GRPO train on what the rollout engine samples, and both engines agree on its log-probs.",
    cases=(
        Case("one rank", {}, 0),
        Case("TP2", {"parallel__tensor_model_parallel_size": 2}, 1, (Feature.TENSOR_PARALLEL,)),
    ),
    limit_s=START_S,
)
def sampled_steps(subject: Subject, case: Case) -> None:
    """Do three steps of a run: a tiny Qwen3 learns to sort digits, with a reference model and two updates per step.

    Every metric must be finite, gradients must not be 0, no update skipped, and the run must warn of nothing. The
    difference of log-probs between rollout and training engine may be that of rounding.
    """
    require_devices(subject.session, 2 if case.values else 1)
    made = Runs.of(subject).make(case.name, **case.values)
    if made.warnings:
        raise Broken("A run finds something suspicious.", "; ".join(made.warnings))
    for number, metrics in enumerate(made.steps, start=1):
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:
            raise Broken("Metrics of a step are not finite.", f"step {number}: {', '.join(wrong)}")
        if metrics["update/skipped"] or not metrics["grad_norm"] > 0.0:
            raise Broken("A step has no gradient.", f"step {number}: grad_norm {metrics['grad_norm']}")
        if metrics[AGREEMENT] > made.tolerance:
            raise Broken(
                "Rollout and training engine do not agree on the log-probs of what was sampled.",
                f"mean difference {metrics[AGREEMENT]:.3g} in step {number}, allowed {made.tolerance:.1g}",
            )


@rule(
    "resumed-run",
    "training",
    "A run that continues from a checkpoint does the steps of the run that saved it.",
    limit_s=START_S,
)
def resumed_run(subject: Subject, case: Case) -> None:
    """Do the third step of that run again, in new processes, from the checkpoint after the second.

    Rewards, losses and gradient norms must be the same. It breaks with what ``restored-checkpoint`` finds, and with
    state that lives in a process and in no checkpoint.
    """
    del case
    runs = Runs.of(subject)
    whole = runs.make("one rank")
    resumed = runs.make("resumed", resume=str(whole.directory / "checkpoints" / "step-000002"))
    wanted, found = whole.steps[-1], resumed.steps[-1]
    if len(resumed.steps) != 1 or found["step"] != wanted["step"]:
        steps = ", ".join(f"{metrics['step']:g}" for metrics in resumed.steps)
        raise Broken("A continued run does other steps than are left.", f"it does {steps}, expected {wanted['step']:g}")
    for name in (key for key in wanted if key.startswith(COMPARED)):
        allowed = whole.tolerance * max(1.0, abs(wanted[name]))
        if not abs(found[name] - wanted[name]) <= allowed:
            raise Broken(
                "A continued run does another step than the run that was not interrupted.",
                f"{name} is {found[name]:.6g}, expected {wanted[name]:.6g} (allowed {allowed:.1g})",
            )
