"""The rule of level ``model`` about multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from anytron.device.platform import Feature
from anytron.proof.verification.engines import OTHER_TEMPERATURE, plan_of
from anytron.proof.verification.hugging_face import LOSS, expected_gradients
from anytron.proof.verification.prediction import allowed_difference, expected_modules
from anytron_conformance.model.observed import Observer, recorded_of
from anytron_conformance.model.parts import SHOWN, gradients_shown, hold_gradients, weights_of
from anytron_conformance.model.table import CONTEXT, DEEPSEEK_V3, ONE, PADDED, PIPELINE, TENSOR, cases
from anytron_conformance.rules import Broken, rule
from anytron_conformance.tiny_models import turn_last_layers_into_prediction_modules, write_tiny_model
from anytron_conformance.training_ranks import START_S, said

if TYPE_CHECKING:
    from pathlib import Path

    from anytron_conformance.model.table import Family
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject

DEPTHS = 2
SECTIONS: dict[str, dict[str, Any]] = {"optimizer": dict(SHOWN), "engine": {"options": {"mtp_loss_coefficient": 1.0}}}


@rule(
    "multi-token-prediction",
    "model",
    "Prediction modules (MTP) have the loss and the gradients of their definition, and leave the policy's as they are.",
    cases=(
        *cases(ONE, DEEPSEEK_V3),
        *cases(PADDED, DEEPSEEK_V3),
        *cases(TENSOR, DEEPSEEK_V3),
        *cases(PIPELINE, DEEPSEEK_V3),
        *cases(CONTEXT, DEEPSEEK_V3),
    ),
    needs=(Feature.MULTI_TOKEN_PREDICTION,),
    limit_s=START_S,
)
def prediction(subject: Subject, case: Case) -> None:
    """Do one update of a tiny DeepSeek-V3 of two layers, with two modules that predict one and two tokens further.

    The definition is section 2.2 of the paper (https://arxiv.org/abs/2412.19437), computed with the layers of
    transformers; the way that each weight goes is its gradient. It breaks with a vendor's own modules that join hidden
    states and embeddings otherwise, or shift tokens over the bounds of packed sequences.
    """
    family, layout = case.values
    observer = Observer.of(subject)
    model = model_with_modules(observer, family)
    config, trainer = observer.build(family, layout, SECTIONS, model)
    dtype = config.model.dtype
    batch = replace(recorded_of(family), temperature=OTHER_TEMPERATURE)
    policy = expected_gradients(model, None, getattr(torch, dtype), batch)
    modules = expected_modules(model, getattr(torch, dtype), policy.batch)
    file = observer.output / "after.safetensors"
    with said():
        metrics = trainer.update(policy.batch, plan_of(trainer, config), LOSS)
        trainer.export_weights(str(file))
    loss, allowed = metrics.get("mtp/loss", 0.0), allowed_difference(dtype, modules.loss)
    if not abs(loss - modules.loss) <= allowed:
        difference = f"it is {loss:.6g}, expected {modules.loss:.6g} to {allowed:.1g}"
        raise Broken("The loss of the prediction modules is not that of their definition.", difference)
    found = gradients_shown(weights_of(model), load_file(file))
    hold_gradients("The modules' gradients are not those of their definition.", found, modules.gradients, dtype)
    hold_gradients("Beside prediction modules the policy has other gradients.", found, policy.gradients, dtype)


def model_with_modules(observer: Observer, family: Family) -> Path:
    """Write a family's tiny model whose last layers are prediction modules, once; give its directory."""
    model = observer.output / "model-with-modules"
    if not model.exists():
        write_tiny_model(family.name, model)
        turn_last_layers_into_prediction_modules(model, DEPTHS)
    return model
