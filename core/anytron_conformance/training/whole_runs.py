"""Rules of level ``training`` about whole runs of ``anytron train``, from prompts to checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from anytron.base.errors import AnytronError, ConfigError
from anytron.base.results import of_error
from anytron.config.diagnostics import refuse
from anytron.device.platform import Feature
from anytron.proof.checks import Inapplicable
from anytron.proof.verification.comparisons import FACTORS
from anytron.record.tracking.progress import Progress
from anytron.run.preflight.open_run import open_run
from anytron.run.trainer.loop import train
from anytron.run.trainer.metrics import AGREEMENT
from anytron.workers.executor.local import LocalExecutor
from anytron_conformance.ranks import require_devices
from anytron_conformance.rules import Broken, Case, rule
from anytron_conformance.training.sort_task import DIGITS, MODEL
from anytron_conformance.training_ranks import START_S, usual_format

if TYPE_CHECKING:
    from pathlib import Path

    from anytron_conformance.subject import Source, Subject


TASK = "anytron_conformance.training.sort_task"
"""Module of the task. Rewards run in separate processes, which import nothing else of the kit."""


@dataclass(frozen=True)
class Run:
    """Results of a run.

    Attributes:
        directory: Directory of the run.
        steps: Metrics of each step.
        warnings: Warnings of the run.
        tolerance: Largest allowed difference of metrics of the same step, relative if a metric is above 1.
    """

    directory: Path
    steps: list[dict[str, float]]
    warnings: list[str]
    tolerance: float


class _Warnings(Progress):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        """Keep it."""
        self.said.append(text)


def sections(source: Source, output: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration of three steps of GRPO on the sort task, in float32."""
    return {
        "model": {"config": MODEL, "tokenizer": f"{TASK}:tokenizer", "dtype": "float32"},
        "data": {"source": f"{TASK}:prompts", "prompts_per_step": 4},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": DIGITS, "temperature": 0.7},
        "algorithm": {"kl_coefficient": 0.05, "entropy_coefficient": 0.01, "mini_batches": 2},
        "optimizer": {"lr": 5e-4},
        "engine": {"max_tokens_per_micro_batch": 48},
        "executor": {"num_threads": 1},
        "platform": {"name": source.platform, "options": dict(source.options)},
        "trainer": {"total_steps": 3, "output_dir": str(output), "save_hf": False, "max_restarts": 0},
        "checkpoint": {"every_steps": 2},
        "tracking": {"plot": False},
    }


def run(source: Source, output: Path, **changes: Any) -> Run:
    """Do a run of the sort task.

    Args:
        source: The platform.
        output: Directory of the run; it is created.
        changes: Values that replace the defaults, by key: ``section__key``, or a key of the top level (``resume``).

    Raises:
        Broken: The run fails.
        Inapplicable: The run is refused.
    """
    tree: dict[str, Any] = {**sections(source, output), "rewards": [{"function": f"{TASK}:reward"}]}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            tree.setdefault(section, {})[key] = value
        else:
            tree[section] = value
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    warnings = _Warnings()
    try:
        refuse((opened := open_run(file, [])).diagnostics)
    except ConfigError as error:
        raise Inapplicable(f"the run is refused: {error.why or error.what}") from error
    try:
        with LocalExecutor(opened.config, opened.session) as executor:
            train(opened.config, executor, warnings)
    except AnytronError as error:
        raise Broken(of_error("", error).explanation) from error
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Run(output, [json.loads(line) for line in lines], warnings.said, 10 * FACTORS[opened.config.model.dtype])


COMPARED = ("reward/", "loss/", "policy/", "rollout/", "grad_norm")
"""Beginnings of the names of metrics that must be the same when a step is repeated."""


class Runs:
    """The runs of a platform, each done once.

    Args:
        subject: The platform.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._made: dict[str, Run] = {}

    @classmethod
    def of(cls, subject: Subject) -> Runs:
        """Return the runs of a subject; there is one object for each subject."""
        return subject.keep("runs", lambda: cls(subject))

    def make(self, name: str, **changes: object) -> Run:
        """Do the run of this name, or return its result if it was done before."""
        if name not in self._made:
            changes = {"engine__sequence_format": usual_format(self._subject), **changes}
            self._made[name] = run(self._subject.source, self._subject.scratch / "runs" / name, **changes)
        return self._made[name]

    def close(self) -> None:
        """Do nothing: the processes of a run end with it."""


@rule(
    "sampled-steps",
    "training",
    "Steps of GRPO train on sampled responses, and rollout and training engine agree on their log-probs.",
    cases=(
        Case("one rank", {}, 0),
        Case("TP2", {"parallel__tensor_model_parallel_size": 2}, 1, (Feature.TENSOR_PARALLEL,)),
    ),
    limit_s=START_S,
)
def sampled_steps(subject: Subject, case: Case) -> None:
    """Do three steps of a run: a tiny Qwen3 learns to sort digits, with a reference model and two updates per step.

    Every metric must be finite, gradients must not be 0, no update may be skipped, and there must be no warning. The
    log-probs of rollout and training engine may differ by rounding only.
    """
    require_devices(subject.session, 2 if case.values else 1)
    made = Runs.of(subject).make(case.name, **case.values)
    if made.warnings:
        raise Broken("A run gives warnings.", "; ".join(made.warnings))
    for number, metrics in enumerate(made.steps, start=1):
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:
            raise Broken("Metrics of a step are not finite.", f"step {number}: {', '.join(wrong)}")
        if metrics["update/skipped"] or not metrics["grad_norm"] > 0.0:
            raise Broken("A step skips an update or has no gradient.", f"step {number}, norm {metrics['grad_norm']}")
        if metrics[AGREEMENT] > made.tolerance:
            raise Broken(
                "Rollout and training engine do not agree on the log-probs of sampled tokens.",
                f"mean difference {metrics[AGREEMENT]:.3g} in step {number}, allowed {made.tolerance:.1g}",
            )


@rule(
    "resumed-run",
    "training",
    "A run that continues from a checkpoint does the same later steps as the run that saved it.",
    limit_s=START_S,
)
def resumed_run(subject: Subject, case: Case) -> None:
    """Do three steps, then the third again in new processes, from the checkpoint after the second.

    Rewards, losses and gradient norms must be the same. Faults that ``restored-checkpoint`` finds break the rule, and
    so does state that is in a process but in no checkpoint.
    """
    del case
    runs = Runs.of(subject)
    whole = runs.make("one rank")
    resumed = runs.make("resumed", resume=str(whole.directory / "checkpoints" / "step-000002"))
    wanted, found = whole.steps[-1], resumed.steps[-1]
    if len(resumed.steps) != 1 or found["step"] != wanted["step"]:
        steps = ", ".join(f"{metrics['step']:g}" for metrics in resumed.steps)
        raise Broken(
            "A continued run does not do the remaining steps.", f"it does steps {steps}, expected {wanted['step']:g}"
        )
    for name in (key for key in wanted if key.startswith(COMPARED)):
        allowed = whole.tolerance * max(1.0, abs(wanted[name]))
        if not abs(found[name] - wanted[name]) <= allowed:
            raise Broken(
                "A step of a continued run differs from the same step of the uninterrupted run.",
                f"{name} is {found[name]:.6g}, expected {wanted[name]:.6g} (allowed {allowed:.1g})",
            )
