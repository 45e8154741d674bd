"""Rules of level ``model`` about parts that some runs have: adapters, a critic, prediction modules, router replay."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from anytron.device.platform import Feature
from anytron.proof.verification.comparisons import largest, measured, tolerance
from anytron.proof.verification.engines import OTHER_TEMPERATURE, VALUE_LOSS, plan_of
from anytron.proof.verification.gradients import (
    adapted_weights,
    adapter_gradients,
    compare_gradients,
    computed_gradients,
)
from anytron.proof.verification.hugging_face import LOSS, expected_gradients
from anytron.proof.verification.prediction import allowed_difference, expected_modules
from anytron.proof.verification.roles import expected_critic, write_critic
from anytron.proof.verification.weights import stored_weights
from anytron_conformance.model.observed import (
    CONTEXT,
    DEEPSEEK_V3,
    EXPERT,
    HALF,
    ONE,
    PADDED,
    PIPELINE,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    TENSOR,
    Observer,
    cases,
    recorded_of,
)
from anytron_conformance.rules import Broken, rule
from anytron_conformance.tiny_models import turn_last_layers_into_prediction_modules, write_tiny_model
from anytron_conformance.training_ranks import START_S, hold, said

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.rollout_engine import RoutingShape
    from anytron_conformance.model.observed import Family
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject


RATE = 1e3
"""Learning rate of an update that shows gradients in full precision: it is so large that a weight's change, not its
previous value, makes up the weight afterwards."""
SHOWN: Mapping[str, Any] = {"name": "sgd", "lr": RATE, "clip_grad": 0.0}
"""The optimizer of an update that shows gradients: plain SGD with the rate :data:`RATE`."""


def weights_of(model: Path) -> dict[str, Tensor]:
    """Read the weights of a tiny model."""
    return load_file(model / "model.safetensors")


def gradients_shown(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the gradients of an update by plain SGD (:data:`SHOWN`) from the weights before and after it, float32."""
    return {name: (before[name] - tensor) / RATE for name, tensor in after.items() if name in before}


def hold_values(what: str, found: Tensor, expected: Tensor, dtype: str) -> None:
    """Compare values of tokens with the expected values, both float32 ``[T]``.

    Args:
        what: What a difference means, a sentence for the platform's author.
        found: Result of the platform.
        expected: Results of transformers.
        dtype: ``model.dtype``.

    Raises:
        Broken: The values differ.
    """
    result = measured("", largest(found - expected), tolerance(dtype, expected), f"{len(expected)} tokens")
    hold(result, what)


def hold_gradients(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: str, of: str = "parameters"
) -> None:
    """Compare gradients with those of transformers, float32, by the weights' names in the model's files.

    Args:
        what: What a difference means, a sentence for the platform's author.
        found: Result of the platform.
        expected: Results of transformers; each of them must be in ``found``.
        dtype: ``model.dtype``.
        of: Name of the tensors whose gradients they are.

    Raises:
        Broken: The values differ.
    """
    hold(compare_gradients("", found, expected, dtype=dtype, skipped={}, what=of, whose="transformers'"), what)


RANK, ALPHA = 4, 4.0
ADAPTED: Mapping[str, dict[str, Any]] = {
    "model": {"lora": {"rank": RANK, "alpha": ALPHA}},
    # Its first step is the rate, whatever the size of a gradient.
    "optimizer": {"name": "adam", "lr": 0.1, "clip_grad": 0.0},
}


@rule(
    "adapters",
    "model",
    "Adapters (LoRA) have the gradients that transformers gives them, and compute the same as when they are merged.",
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

    The exported weights must be the model's, with the product of both factors added where there is an adapter;
    log-probs and gradients must be those of transformers with these weights. A vendor's
    linear layers break the rule if they omit the adapter in the forward or the backward pass.
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
    hold_values("With adapters, log-probs differ from the merged model's.", log_probs, truth.log_probs, dtype)
    expected = adapter_gradients(factors, truth.gradients, ALPHA / RANK)
    if others := gradients.keys() - factors.keys():
        raise Broken("Parameters other than adapters have a gradient.", f"{len(others)}, first {min(others)}")
    hold_gradients(
        "Gradients of adapters differ from transformers'.", gradients, expected, dtype, "factors of adapters"
    )


def _hold_merged(
    found: Mapping[str, Tensor], model: Mapping[str, Tensor], factors: Mapping[str, Tensor], dtype: str
) -> None:
    """Hold exported weights against the model's and the product of the factors, which are computed in float32.

    Raises:
        Broken: The weights differ, or a factor is 0.
    """
    expected = adapted_weights(model, factors, ALPHA / RANK)
    if found.keys() != expected.keys():
        names = sorted(found.keys() ^ expected.keys())
        raise Broken(
            "The merged weights have other names than the model's.", f"missing or unknown: {', '.join(names[:3])}"
        )
    still = [name for name, factor in factors.items() if not factor.any()]
    if still:
        raise Broken("Factors of adapters are 0 after an update.", f"{len(still)} of {len(factors)}, first {still[0]}")
    off = {name: largest(found[name] - tensor) for name, tensor in expected.items()}
    worst = max(off, key=lambda name: off[name])
    allowed = tolerance(dtype, expected[worst])
    if not off[worst] <= allowed:
        raise Broken(
            "The exported weights are not the model's plus the product of its adapters' factors.",
            f"largest difference {off[worst]:.3g} in {worst}, allowed {allowed:.1g}",
        )


@rule(
    "critic",
    "model",
    "A critic's values, and the gradients of its value head and its trunk, equal transformers'.",
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

    transformers computes hidden states and the same clipped loss; the change of each weight must be its gradient. Hooks
    break the rule if they treat every output as log-probs of a response (values belong to each token, and may be
    positive); kernels and scopes break it if they keep state of the policy, which is in the same process.
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
            raise Broken("The ranks return no values.")
        hold_values("Values differ from the value head times transformers' hidden states.", values, truth.values, dtype)
        trainer.update_critic(truth.batch, plan, VALUE_LOSS)
        trainer.save_critic(str(left))
    found = gradients_shown(stored_weights(start), stored_weights(left))
    hold_gradients("Gradients of the critic differ from transformers'.", found, truth.gradients, dtype)


DEPTHS = 2
SECTIONS: dict[str, dict[str, Any]] = {"optimizer": dict(SHOWN), "engine": {"options": {"mtp_loss_coefficient": 1.0}}}


@rule(
    "multi-token-prediction",
    "model",
    "Prediction modules (MTP) have the loss and gradients of their definition; the policy's gradients stay the same.",
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
    """Do one update of a tiny DeepSeek-V3 of two layers, with modules that predict one and two tokens further ahead.

    The definition is section 2.2 of the paper (https://arxiv.org/abs/2412.19437), computed with layers of Hugging Face
    transformers. The optimizer is SGD, so that the change of a weight shows its gradient. A vendor's own modules break
    the rule if they combine hidden states and embeddings differently, or shift tokens across the borders of packed
    sequences.
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
        difference = f"it is {loss:.6g}, expected {modules.loss:.6g} (allowed difference {allowed:.1g})"
        raise Broken("The loss of the prediction modules differs from its definition.", difference)
    found = gradients_shown(weights_of(model), load_file(file))
    hold_gradients(
        "The gradients of the prediction modules differ from their definition.", found, modules.gradients, dtype
    )
    hold_gradients("With prediction modules, the policy's gradients are wrong.", found, policy.gradients, dtype)


def model_with_modules(observer: Observer, family: Family) -> Path:
    """Write, once, a family's tiny model whose last layers are prediction modules; return its directory."""
    model = observer.output / "model-with-modules"
    if not model.exists():
        write_tiny_model(family.name, model)
        turn_last_layers_into_prediction_modules(model, DEPTHS)
    return model


REPLAYED = {"rollout": {"replay_routing": True}}


@rule(
    "router-replay",
    "model",
    "Where the experts of each token are given, log-probs and gradients equal transformers' with these experts.",
    cases=(
        *cases(ONE, QWEN3_MOE, DEEPSEEK_V3),
        *cases(HALF, QWEN3_MOE),
        *cases(PADDED, QWEN3_MOE),
        *cases(TENSOR, QWEN3_MOE),
        *cases(EXPERT, DEEPSEEK_V3),
    ),
    needs=(Feature.ROUTER_REPLAY,),
    limit_s=START_S,
)
def router_replay(subject: Subject, case: Case) -> None:
    """Send each token to random experts, as if a rollout had chosen them (``rollout.replay_routing``).

    transformers computes with the same experts, weighted by its own scores. Kernels for routing, or for the
    permutation of tokens, break the rule if they choose experts themselves, and hooks break it if they change the order
    of tokens.
    """
    family, layout = case.values
    observer = Observer.of(subject)
    config, trainer = observer.build(family, layout, REPLAYED)
    with said():
        shape = trainer.topology[0].rollout_routing
        if shape is None:
            raise Broken("The engine does not report the shape of its routing, which rollout.replay_routing needs.")
        batch = replace(_sent_by_lot(recorded_of(family), shape), temperature=OTHER_TEMPERATURE)
        dtype = config.model.dtype
        truth = expected_gradients(observer.model(family), None, getattr(torch, dtype), batch)
        plan = plan_of(trainer, config)
        log_probs = trainer.score(truth.batch, plan, "policy")
        gradients = computed_gradients(trainer, plan, truth.batch, observer.output)[0]
    hold_values("Log-probs differ from transformers' with the given experts.", log_probs, truth.log_probs, dtype)
    hold_gradients("Gradients differ from transformers' with the given experts.", gradients, truth.gradients, dtype)


def _sent_by_lot(batch: RaggedBatch, shape: RoutingShape) -> RaggedBatch:
    """Choose experts for every token but the last of each sequence, which no rollout engine computes."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(batch.num_tokens, shape.layers, shape.experts, generator=generator)
    routing = scores.topk(shape.chosen).indices.to(shape.dtype)
    routing[batch.lengths.cumsum(0) - 1] = 0
    return replace(batch, routing=routing)
