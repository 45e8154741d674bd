"""The rule of level ``model`` about adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from anytron.device.platform import Feature
from anytron.proof.verification.comparisons import largest, tolerance
from anytron.proof.verification.engines import OTHER_TEMPERATURE, plan_of
from anytron.proof.verification.gradients import adapted_weights, adapter_gradients, computed_gradients
from anytron.proof.verification.hugging_face import LOSS, expected_gradients
from anytron_conformance.model.observed import Observer, recorded_of
from anytron_conformance.model.parts import hold_gradients, hold_values, weights_of
from anytron_conformance.model.table import DEEPSEEK_V3, EXPERT, ONE, QWEN3, QWEN3_MOE, QWEN3_NEXT, TENSOR, cases
from anytron_conformance.rules import Broken, rule
from anytron_conformance.training_ranks import START_S, said

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject

RANK, ALPHA = 4, 4.0
ADAPTED: Mapping[str, dict[str, Any]] = {
    "model": {"lora": {"rank": RANK, "alpha": ALPHA}},
    # Its first step is the rate, whatever the size of a gradient.
    "optimizer": {"name": "adam", "lr": 0.1, "clip_grad": 0.0},
}


@rule(
    "adapters",
    "model",
    "Adapters (LoRA) have the gradients that transformers gives them, and merged into the model they compute the same.",
    cases=(
        *cases(ONE, QWEN3, QWEN3_MOE, DEEPSEEK_V3, QWEN3_NEXT),
        *cases(TENSOR, QWEN3),
        *cases(EXPERT, QWEN3_MOE),
    ),
    needs=(Feature.ADAPTERS,),
    limit_s=START_S,
)
def adapters(subject: Subject, case: Case) -> None:
    """Do one update of adapters on every linear layer, after which none of their factors is 0.

    The exported weights must be those of the model, with the product of both factors added where there is an adapter
    and unchanged elsewhere; log-probs and gradients must be those of transformers with these weights. It breaks with
    linear layers of a vendor that leave the adapter out, or forget it in one of the two passes.
    """
    family, layout = case.values
    observer = Observer.of(subject)
    config, trainer = observer.build(family, layout, ADAPTED)
    dtype = config.model.dtype
    merged, alone = observer.output / "merged.safetensors", observer.output / "adapter.safetensors"
    batch = replace(recorded_of(family), temperature=OTHER_TEMPERATURE)
    with said():
        plan = plan_of(trainer, config)
        trainer.update(batch, plan, LOSS)
        trainer.export_weights(str(merged))
        trainer.export_weights(str(alone), "adapter")
        factors = load_file(alone)
        _hold_merged(load_file(merged), weights_of(observer.model(family)), factors, dtype)
        truth = expected_gradients(observer.model(family), merged, getattr(torch, dtype), batch)
        log_probs = trainer.score(truth.batch, plan, "policy")
        gradients = computed_gradients(trainer, plan, truth.batch, observer.output)[0]
    hold_values("With adapters log-probs are not those of the merged model.", log_probs, truth.log_probs, dtype)
    expected = adapter_gradients(factors, truth.gradients, ALPHA / RANK)
    if others := gradients.keys() - factors.keys():
        raise Broken("Not only adapters have a gradient.", f"{len(others)} others, first {min(others)}")
    hold_gradients("Gradients of adapters are not transformers'.", gradients, expected, dtype, "factors of adapters")


def _hold_merged(
    found: Mapping[str, Tensor], model: Mapping[str, Tensor], factors: Mapping[str, Tensor], dtype: str
) -> None:
    """Hold exported weights against the model's and the product of the factors, which are computed in float32.

    Raises:
        Broken: They differ, or a factor is 0.
    """
    expected = adapted_weights(model, factors, ALPHA / RANK)
    if found.keys() != expected.keys():
        names = sorted(found.keys() ^ expected.keys())
        raise Broken("The merged weights are not those of the model.", f"missing or unknown: {', '.join(names[:3])}")
    still = [name for name, factor in factors.items() if not factor.any()]
    if still:
        raise Broken("An update does not move adapters.", f"{len(still)} of {len(factors)}, first {still[0]}")
    off = {name: largest(found[name] - tensor) for name, tensor in expected.items()}
    worst = max(off, key=lambda name: off[name])
    allowed = tolerance(dtype, expected[worst])
    if not off[worst] <= allowed:
        raise Broken(
            "The exported weights are not the model's plus the product of its adapters' factors.",
            f"largest difference {off[worst]:.3g} in {worst}, allowed {allowed:.1g}",
        )
