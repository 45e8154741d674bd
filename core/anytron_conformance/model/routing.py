"""The rule of level ``model`` about router replay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from anytron.device.platform import Feature
from anytron.proof.verification.engines import OTHER_TEMPERATURE, plan_of
from anytron.proof.verification.gradients import computed_gradients
from anytron.proof.verification.hugging_face import expected_gradients
from anytron_conformance.model.observed import Observer, recorded_of
from anytron_conformance.model.parts import hold_gradients, hold_values
from anytron_conformance.model.table import DEEPSEEK_V3, EXPERT, HALF, ONE, PADDED, QWEN3_MOE, TENSOR, cases
from anytron_conformance.rules import Broken, rule
from anytron_conformance.training_ranks import START_S, said

if TYPE_CHECKING:
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.rollout_engine import RoutingShape
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject

REPLAYED = {"rollout": {"replay_routing": True}}


@rule(
    "router-replay",
    "model",
    "Where the experts of each token are given, log-probs and gradients are those of transformers with these experts.",
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
    """Send each token to experts drawn by lot, as if a rollout had chosen them (``rollout.replay_routing``).

    transformers computes with the same experts, weighted by its own scores. It breaks with kernels for routing, or for
    the permutation of tokens, that choose the experts by themselves, and with hooks that change the order of tokens.
    """
    family, layout = case.values
    observer = Observer.of(subject)
    config, trainer = observer.build(family, layout, REPLAYED)
    with said():
        shape = trainer.topology[0].rollout_routing
        if shape is None:
            raise Broken("The engine names no shape of routing, and rollout.replay_routing asks for it.")
        batch = replace(_sent_by_lot(recorded_of(family), shape), temperature=OTHER_TEMPERATURE)
        dtype = config.model.dtype
        truth = expected_gradients(observer.model(family), None, getattr(torch, dtype), batch)
        plan = plan_of(trainer, config)
        log_probs = trainer.score(truth.batch, plan, "policy")
        gradients = computed_gradients(trainer, plan, truth.batch, observer.output)[0]
    hold_values("Log-probs are not those of the experts that were given.", log_probs, truth.log_probs, dtype)
    hold_gradients("Gradients are not those of the experts that were given.", gradients, truth.gradients, dtype)


def _sent_by_lot(batch: RaggedBatch, shape: RoutingShape) -> RaggedBatch:
    """Choose experts for every token but the last of each sequence, which no rollout engine computes."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(batch.num_tokens, shape.layers, shape.experts, generator=generator)
    routing = scores.topk(shape.chosen).indices.to(shape.dtype)
    routing[batch.lengths.cumsum(0) - 1] = 0
    return replace(batch, routing=routing)
