"""Experts that are chosen, weighed, counted or replayed wrongly."""

from __future__ import annotations

import torch

from tests.corpus.fault import Fault, in_place_of

TOPK = (
    "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function",
    "megatron.core.transformer.moe.router:topk_routing_with_score_function",
)
ROUTER = "megatron.core.transformer.moe.router:TopKRouter"


class NormalisationOfTopKHardCoded(Fault):
    """The chosen probabilities are not normalised, whatever the configuration says."""

    run, rule = "moe", "hf-logits"

    @staticmethod
    @in_place_of(*TOPK)
    def unnormalised(original, logits, topk, *arguments, use_pre_softmax=False, **named):
        return original(logits, topk, *arguments, use_pre_softmax=not use_pre_softmax, **named)


class GateValuesFromBiasedScores(Fault):
    """The experts' weights come from the scores with the bias, which may decide about the choice only."""

    run, rule = "mla", "hf-logits"

    @staticmethod
    @in_place_of(*TOPK)
    def biased(original, logits, topk, *arguments, expert_bias=None, **named):
        if expert_bias is not None:
            scores = (logits.float().sigmoid() + expert_bias).clamp(1e-3, 1 - 1e-3)
            logits = torch.logit(scores).type_as(logits)
        return original(logits, topk, *arguments, expert_bias=None if expert_bias is None else 0 * expert_bias, **named)


class DroppedPairsSortedToTheFront(Fault):
    """Rows of tokens that another rank's experts take come first, and count as this rank's."""

    run, rule = "ep2", "hf-logits"

    @staticmethod
    @in_place_of("megatron.core.transformer.moe.token_dispatcher:permute")
    def front(original, tokens, routing_map, *arguments, **named):
        permuted, *others = original(tokens, routing_map, *arguments, **named)
        return permuted.roll(1, 0), *others
