"""The rule of level ``model`` about the critic."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch

from anytron.device.platform import Feature
from anytron.proof.verification.engines import VALUE_LOSS, plan_of
from anytron.proof.verification.roles import expected_critic, write_critic
from anytron.proof.verification.weights import stored_weights
from anytron_conformance.model.observed import Observer, recorded_of
from anytron_conformance.model.parts import SHOWN, gradients_shown, hold_gradients, hold_values
from anytron_conformance.model.table import (
    CONTEXT,
    DEEPSEEK_V3,
    ONE,
    PADDED,
    PIPELINE,
    QWEN2,
    QWEN3,
    TENSOR,
    cases,
)
from anytron_conformance.rules import Broken, rule
from anytron_conformance.training_ranks import START_S, said

if TYPE_CHECKING:
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject


@rule(
    "critic",
    "model",
    "A critic has the values, and the gradients of its value head and its trunk, that transformers gives it.",
    cases=(
        *cases(ONE, QWEN3, QWEN2, DEEPSEEK_V3),
        *cases(PADDED, QWEN3),
        *cases(TENSOR, QWEN3),
        *cases(PIPELINE, QWEN2),
        *cases(CONTEXT, QWEN3),
    ),
    needs=(Feature.CRITIC,),
    limit_s=START_S,
)
def critic(subject: Subject, case: Case) -> None:
    """Compute values of all tokens with a second model, and do one update of it.

    transformers computes hidden states and the same clipped loss; the way that each weight goes is its gradient. It
    breaks with hooks that take every output for log-probs of a response (values belong to each token, and may be
    positive), and with kernels or scopes that hold something of the policy, which is in the same process.
    """
    family, layout = case.values
    observer = Observer.of(subject)
    model = observer.model(family)
    start, left = observer.output / "critic-before", observer.output / "critic-after"
    for directory in (start, left):
        shutil.rmtree(directory, ignore_errors=True)
    write_critic(model, start)
    sections: dict[str, dict[str, Any]] = {
        "critic": {"path": str(start), "optimizer": SHOWN},
        "algorithm": {"advantage": "gae"},
    }
    config, trainer = observer.build(family, layout, sections)
    dtype = config.model.dtype
    truth = expected_critic(start, getattr(torch, dtype), recorded_of(family))
    with said():
        plan = plan_of(trainer, config)
        values = trainer.with_values(truth.batch, plan).values
        if values is None:
            raise Broken("The ranks answer without values.")
        hold_values("Values are not those of transformers' hidden states.", values, truth.values, dtype)
        trainer.update_critic(truth.batch, plan, VALUE_LOSS)
        trainer.save_critic(str(left))
    found = gradients_shown(stored_weights(start), stored_weights(left))
    hold_gradients("Gradients of the critic are not transformers'.", found, truth.gradients, dtype)
